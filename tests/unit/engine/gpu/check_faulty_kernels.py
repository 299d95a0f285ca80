"""Builds ``faulty_kernels`` for sm_90 and prints the faults of each variant as JSON."""

from __future__ import annotations

import json

from engine.backends.gpu import compile_check, kernels
from tests.unit.engine.gpu import faulty_kernels

kernels.modules = lambda: {"faulty_kernels": faulty_kernels}
jobs = [job for job in compile_check.jobs_of("faulty_kernels") if str(job.target) == "sm_90"]
print(json.dumps({job.variant: compile_check.build(job).faults() for job in jobs}))
