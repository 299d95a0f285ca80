"""The images of the tests, made without a registry, and kept until what they are made of changes.

debootstrap ──> base (Debian, Python, Redis) ──┐
pip download ──> wheels ──────────────────────┴──> deploy/Dockerfile ──> pdmesh
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.deploy.docker_engine import DockerEngine

ROOT = Path(__file__).parents[2]

_SUITE = "bookworm"
_PACKAGES = "python3-venv,redis-server"
_BUILD_TIMEOUT_S = 600.0
_KEEP_BYTES = "4GB"


def make_images(engine: DockerEngine) -> dict[str, str]:
    """Build what is missing; the settings that make compose use it."""
    base = _imported(engine, "pdmesh-base", f"{_SUITE} {_PACKAGES}", _debootstrap)
    lock = (ROOT / "requirements.lock").read_text()
    wheels = _imported(engine, "pdmesh-wheels", f"{sys.version_info[:2]} {lock}", _download)
    image = "pdmesh:tests"
    engine.docker(
        *("build", "--network", "none", "--file", str(ROOT / "deploy/Dockerfile"), "--tag", image),
        *("--build-arg", f"BASE={base}", "--build-arg", f"WHEELS={wheels}"),
        *("--build-arg", "PIP_ARGS=--no-index", "--quiet", str(ROOT)),
        timeout_s=_BUILD_TIMEOUT_S,
    )
    engine.docker("image", "prune", "--force")
    engine.docker("builder", "prune", "--force", "--keep-storage", _KEEP_BYTES)
    return {"PDMESH_IMAGE": image, "PDMESH_REDIS_IMAGE": base}


def _imported(engine: DockerEngine, name: str, made_of: str, fill) -> str:  # type: ignore[no-untyped-def]
    """An image of the files that ``fill(folder)`` makes, unless there is one of the same name."""
    tag = f"{name}:{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    if engine.docker("images", "--quiet", tag):
        return tag
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=engine.cache) as folder:
        fill(Path(folder))
        archive = Path(folder).with_suffix(".tar")
        try:
            _run("tar", "--create", "--file", str(archive), "--directory", folder, ".")
            engine.docker("import", str(archive), tag, timeout_s=120)
        finally:
            archive.unlink(missing_ok=True)
    return tag


def _debootstrap(folder: Path) -> None:
    os.chmod(folder, 0o755)  # it becomes the containers' root
    _run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(folder))
    for path in (folder / "var/cache/apt/archives").glob("*.deb"):
        path.unlink()


def _download(folder: Path) -> None:
    """With this machine's pip settings, which the images then need not know."""
    more = shlex.split(os.environ.get("PDMESH_PIP_ARGS", ""))
    lock = str(ROOT / "requirements.lock")
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *more),
        *("--requirement", lock, "--dest", str(folder)),
    )


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
