"""What the prefill worker's control loop does before the model thread has its turn."""

from __future__ import annotations

from mesh.config import WorkerConfig
from mesh.messages import PeerRef, PrefillRequest, SamplingParams
from prefill_worker.control import PrefillControl
from tests.unit.engine.tiny_llama import TinyLlama, random_prompt


async def test_a_transfer_is_expected_before_the_model_thread_takes_the_request(
    tiny_llama: TinyLlama,
) -> None:
    config = WorkerConfig(
        role="prefill", worker_id="p", redis_url="redis://127.0.0.1:1", transport="tcp"
    )
    control = PrefillControl(config, tiny_llama.engine(role="prefill"))
    request = PrefillRequest(
        request_id="r",
        transfer_id="t",
        token_ids=tuple(random_prompt(20, seed=1)),
        num_prompt_tokens=20,
        sampling=SamplingParams(max_tokens=4, temperature=0.0),
        ttl_s=60.0,
        decode=PeerRef(worker_id="d", epoch=1, endpoint="tcp://127.0.0.1:1"),
    )
    # The model thread is not started: it is as busy as can be.
    control._on_message("g", request)
    assert control._load().open_transfers == 1
    control._on_message("g", request)  # in use: the loop will say so, and nothing breaks here
    assert control._load().open_transfers == 1
    control._transport.close()
