"""An HTTP server with the routes of vLLM and SGLang that keeps the weights, and fails or stalls on request."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import queue
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from fleet import free_port
from torch import Tensor

from weightsync.schemes.engines.carrier import Carrier
from weightsync.schemes.engines.client import Bucket

#: Seconds after which a stalled call ends by itself. Only a failing test waits so long.
PATIENCE = 60.0
#: The routes of vLLM's weight transfer.
_PHASES = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class EngineServer:
    """An engine and its HTTP server, in threads of this process."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.version = ""
        #: The routes called, in order.
        self.calls: list[str] = []
        self.bodies: dict[str, list[Any]] = defaultdict(list)
        self.paused = False
        #: The bytes of tensors in each update call.
        self.sizes: list[int] = []
        #: How the server misbehaves at each route, one entry per call: a status; "stall", "die" or "stall and die";
        #: "garbage", a page of another server; "unsuccessful" and "wrong", errors with the status of success; "half",
        #: an answer without its body. With " after", it first handles the call correctly. "serve" is correct behaviour.
        self.plan: dict[str, list[int | str]] = defaultdict(list)
        self.stalled = threading.Event()
        self._released = threading.Event()
        #: Set when the client closes the connection of a stalled call.
        self.hung_up = threading.Event()
        #: The tensors that a carrier has sent beside the calls.
        self.carried: queue.SimpleQueue[Bucket] = queue.SimpleQueue()
        #: The engine's half of a transfer. None: the tensors arrive as `Inline` and `Beside` send them.
        self.half: Any = None
        #: No other process gets this port while the server is down.
        self.port = free_port()
        self._server = self._serve(self.port)
        self.url = f"http://127.0.0.1:{self.port}"

    def _serve(self, port: int) -> ThreadingHTTPServer:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                engine.answer(self)

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = False
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return server

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length", 0))
        body = json.loads(handler.rfile.read(length) or b"{}")
        route = handler.path.strip("/")
        self.calls.append(route)
        self.bodies[route].append(body)
        planned = self.plan[route].pop(0) if self.plan[route] else None
        done = isinstance(planned, str) and planned.endswith(" after")
        if isinstance(planned, str) and done:
            self._tried(route, body)
            planned = planned.removesuffix(" after")
        if planned in ("stall", "stall and die"):
            self._stall(handler.connection)
            if done and self.hung_up.is_set():
                return  # handling the call again would undo the effect of the client's next call
        if planned == "stall and die":
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if planned == "die":
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if planned == "half":
            handler.send_response(200)
            handler.send_header("Content-Length", "20")
            handler.end_headers()
            return
        self._reply(handler, *self._answered(planned, route, body))

    def _answered(self, planned: int | str | None, route: str, body: Any) -> tuple[int, str]:
        if planned == "garbage":
            return 200, "<html>Log in first</html>"
        if planned == "unsuccessful":
            return 200, json.dumps({"success": False, "message": "out of blocks"})
        if planned == "wrong":
            return 200, json.dumps({"error": "the engine is dead"})
        if planned == "500":
            planned = 500
        status, answer = (planned, {"error": "out of blocks"}) if isinstance(planned, int) else self._tried(route, body)
        return status, json.dumps(answer)

    @staticmethod
    def _reply(handler: BaseHTTPRequestHandler, status: int, text: str) -> None:
        with contextlib.suppress(OSError):
            handler.send_response(status)
            handler.end_headers()
            handler.wfile.write(text.encode())

    def _stall(self, connection: socket.socket) -> None:
        self.stalled.set()
        for _ in range(int(PATIENCE / 0.01)):
            if self._released.wait(0.01):
                return
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if connection.recv(1, socket.MSG_PEEK) == b"":
                    self.hung_up.set()
                    return
            connection.setblocking(True)

    def _tried(self, route: str, body: Any) -> tuple[int, Any]:
        try:
            return self._do(route, body)
        except Exception as error:  # noqa: BLE001 - a server answers with the error
            return 500, {"error": repr(error)}

    def _do(self, route: str, body: Any) -> tuple[int, Any]:
        route, _, _ = route.partition("?")
        match route:
            case "pause" | "pause_generation":
                self.paused = True
            case "resume" | "continue_generation":
                self.paused = False
            case "flush_cache" | "reset_prefix_cache":
                pass
            case "update_weights_from_tensor" | "update_weights_from_distributed" | "init_weights_update_group":
                return 200, {"success": self._sglang(route, body), "message": "Succeeded"}
            case _ if route in _PHASES:
                self._phase(route, body)
            case _:
                return 404, {"error": f"no {route}"}
        return 200, {"message": "done"}

    def _sglang(self, route: str, body: Any) -> bool:
        if route == "init_weights_update_group":
            if self.half is None:
                return bool(body["group_name"] == "weight_update_group")
            self.half.init(body)
            return True
        if route == "update_weights_from_tensor":
            serialized, *others = body["serialized_named_tensors"]
            assert others == [serialized] * len(others)
            bucket = pickle.loads(base64.b64decode(serialized))
        else:
            bucket = self.carried.get() if self.half is None else self.half.receive(body)
            assert [name for name, _ in bucket] == body["names"]
            assert [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket] == body["dtypes"]
        self._load(bucket)
        self.version = body["weight_version"]
        return True

    def _phase(self, phase: str, body: Any) -> None:
        if phase == "update_weights":
            self._load(self._vllm(body["update_info"]))
        if phase == "finish_weight_update":
            self.version = body["weight_version"]
        if self.half is None:
            return
        match phase:
            case "init_weight_transfer_engine":
                self.half.init(body["init_info"])
            case "start_weight_update":
                self.half.start()
            case "finish_weight_update":
                self.weights |= dict(self.half.finish())

    def _vllm(self, info: dict[str, Any]) -> Bucket:
        if self.half is not None:
            bucket = self.half.receive(info)
        else:
            bucket = pickle.loads(base64.b64decode(info["inline"])) if "inline" in info else self.carried.get()
        assert [name for name, _ in bucket] == info["names"]
        assert [list(tensor.shape) for _, tensor in bucket] == info["shapes"]
        assert [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket] == info["dtype_names"]
        return bucket

    def _load(self, bucket: Bucket) -> None:
        self.sizes.append(sum(tensor.nbytes for _, tensor in bucket))
        self.weights |= dict(bucket)

    def release(self) -> None:
        """Let stalled calls continue."""
        self._released.set()

    def die(self) -> None:
        """End the server, and stop listening at its port."""
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE)

    def restart(self) -> None:
        """Restart the server at the same port, without weights."""
        self.die()
        self.weights, self.calls, self.paused = {}, [], False
        self._released = threading.Event()
        self._server = self._serve(self.port)


class Inline(Carrier):
    """A carrier that puts the tensors into the calls themselves. Only this server has this backend."""

    def init_info(self) -> dict[str, Any]:
        return {"backend": "inline"}

    def update_info(self, bucket: Bucket) -> dict[str, Any]:
        owned = [(name, tensor.clone()) for name, tensor in bucket]
        return {"inline": base64.b64encode(pickle.dumps(owned)).decode()}


class Beside(Carrier):
    """A carrier that transfers the tensors outside the calls, as NCCL does."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self.joined = 0
        self.fails: Callable[[], None] = lambda: None
        self.given_up = threading.Event()

    def join(self) -> None:
        self.joined += 1

    def update_info(self, bucket: Bucket) -> dict[str, Any]:
        return {}

    def send(self, bucket: Bucket) -> None:
        self.fails()
        self._server.carried.put([(name, tensor.clone()) for name, tensor in bucket])

    def give_up(self) -> None:
        self.given_up.set()


@contextlib.contextmanager
def serving() -> Iterator[EngineServer]:
    server = EngineServer()
    try:
        yield server
    finally:
        server.die()


def equal(server: EngineServer, model: torch.nn.Module) -> bool:
    sent = model.state_dict()
    return server.weights.keys() == sent.keys() and all(torch.equal(server.weights[name], sent[name]) for name in sent)
