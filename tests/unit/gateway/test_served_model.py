"""Model files, chat templates and what the gateway reads from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.prompts.chat import encode_chat
from gateway.prompts.chat_template import ChatTemplate
from gateway.prompts.served_model import ServedModel, load_served_model
from gateway.request.decoding import decode_chat_request
from mesh.errors import ConfigError, InvalidRequest
from mesh.model_text.model_files import ModelFiles, resolve_model
from tests.unit.gateway.test_tokenizer import hf_folder  # noqa: F401

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo "},
    {"role": "user", "content": "more 12"},
]


def test_smollm2(model: ServedModel) -> None:
    assert model.name == "SmolLM2-135M-Instruct"
    assert model.eos_token_ids == (2,)
    assert model.max_model_len == 8192
    assert model.tokenizer.vocab_size == 49152


def test_smollm2_template_equals_transformers(model: ServedModel) -> None:
    """Golden: AutoTokenizer(gguf_file=…).apply_chat_template of transformers 5.24."""
    template = model.chat_template
    assert template is not None
    assert template.render(TURNS) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYo <|im_end|>\n<|im_start|>user\nmore 12<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render(TURNS[1:2], add_generation_prompt=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    continued = template.render(TURNS[:3], add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("<|im_start|>assistant\nYo ")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0]['content'] | tojson }}", '"Be brief."'),
        ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{{ bos_token }}{{ messages | length }}", "<s>4"),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}t{% endif %}{{ extra }}", "given"),
        ("{{ add_generation_prompt }}", "True"),
    ],
)
def test_template_helpers(source: str, expected: str) -> None:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    assert template.render(TURNS, variables={"extra": "given"}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ missing.field }}",
        "{{ messages[99]['role'] }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_template_errors_are_400(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render(TURNS)
    assert caught.value.param == "messages"


def test_variables_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages | length }}")
    assert template.render(TURNS, variables={"messages": []}) == "4"


def test_broken_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate("{% if %}")


def test_final_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("x").render(TURNS, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def folder_model(folder: Path, **files: object) -> ServedModel:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_served_model(resolve_model(str(folder)))


def test_hf_folder_defaults_and_ends(hf_folder: Path) -> None:  # noqa: F811
    model = folder_model(
        hf_folder, generation_config={"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 5]}
    )
    assert model.name == hf_folder.name
    assert model.max_model_len == 512
    assert model.eos_token_ids == (1, 5)
    assert (model.defaults.temperature, model.defaults.top_k, model.defaults.top_p) == (0.6, 20, 1)
    assert model.chat_template is None


def test_hf_folder_end_from_the_tokenizer(hf_folder: Path) -> None:  # noqa: F811
    assert folder_model(hf_folder).eos_token_ids == (1,)


def test_hf_folder_templates(hf_folder: Path) -> None:  # noqa: F811
    named = {
        "bos_token": "<s>",
        "chat_template": [{"name": "default", "template": "A{{bos_token}}"}],
    }
    model = folder_model(hf_folder, tokenizer_config=named)
    assert model.chat_template is not None
    assert model.chat_template.render(TURNS) == "A<s>"
    (hf_folder / "chat_template.jinja").write_text("B{{ bos_token }}")
    model = folder_model(hf_folder)
    assert model.chat_template is not None
    assert model.chat_template.render(TURNS) == "B<s>"


def test_broken_files_are_config_errors(hf_folder: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="generation_config"):
        folder_model(hf_folder, generation_config={"temperature": "hot"})
    (hf_folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        folder_model(hf_folder)


def test_resolve_model(tmp_path: Path) -> None:
    default = resolve_model("")
    assert (default.kind, default.name) == ("gguf", "SmolLM2-135M-Instruct")
    assert resolve_model(str(default.path)) == default
    assert resolve_model(str(default.path.parent)) == default
    for name, expected in (
        ("m.Q4_K_M.gguf", "m"),
        ("m-q8_0.gguf", "m"),
        ("a.b-BF16.gguf", "a.b"),
        ("plain.gguf", "plain"),
    ):
        file = tmp_path / name
        file.write_bytes(b"GGUF")
        assert resolve_model(str(file)) == ModelFiles(kind="gguf", path=file, name=expected)


def test_no_such_model(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="model:"):
            resolve_model(str(path))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"not a \.gguf"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("add_special_tokens", [False, True])
@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ 'hi' }}"])
def test_a_chat_prompt_has_one_bos_at_most(
    hf_folder: Path,  # noqa: F811
    template: str,
    add_special_tokens: bool,
) -> None:
    """The template's, or the tokenizer's where the request asks for it; never both."""
    (hf_folder / "chat_template.jinja").write_text(template)
    model = folder_model(hf_folder)
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"messages": messages, "add_special_tokens": add_special_tokens})
    request = decode_chat_request(body.encode())
    ids = encode_chat(model, request, time_s=5.0)
    expected = 1 if "bos_token" in template or add_special_tokens else 0
    assert ids.count(0) == expected
    assert expected == 0 or ids[0] == 0
