"""A worker process for the link tests: serves links until killed; prints its endpoint."""

import asyncio
import sys

from mesh.links.listen import WorkerServer
from mesh.messages import StatusRequest


async def main(epoch: int) -> None:
    server = WorkerServer(
        bind="tcp://127.0.0.1:0",
        worker_id="w0",
        epoch=epoch,
        fingerprint="f",
        on_message=lambda peer, message: server.send(peer, StatusRequest(seq=message.seq + 1)),
        on_peer_down=lambda peer: print(f"down {peer}", flush=True),
    )
    await server.start()
    print(server.endpoint, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
