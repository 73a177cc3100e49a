"""A server with a number on the device, which each request counts on: `web.py PORT OUTPUT`. It is its own client, too,
over a connection that stays open, and writes what it is answered into OUTPUT."""

import ctypes
import http.client
import os
import sys
import threading
import time
from ctypes import byref, c_uint64, c_void_p
from typing import Any

import uvicorn
from fastapi import FastAPI

CUDA = ctypes.CDLL("libcuda.so.1")
WORDS = 1024
app = FastAPI()
context, memory = c_void_p(), c_uint64()
one_at_a_time = threading.Lock()


def call(name: str, *arguments: object) -> None:
    if code := getattr(CUDA, name)(*(c_uint64(a) if isinstance(a, int) else a for a in arguments)):
        raise SystemExit(f"{name} returned {code}")


@app.get("/next")
def count() -> dict[str, Any]:
    with one_at_a_time:
        call("cuCtxSetCurrent", context)
        content = (ctypes.c_uint32 * WORDS)()
        call("cuMemcpyDtoH_v2", content, memory.value, 4 * WORDS)
        call("cuMemsetD32_v2", memory.value, content[5] + 1, WORDS)
        return {"value": content[5], "pid": os.getpid()}


def ask(port: int, path: str) -> None:
    connection = None
    with open(path, "w") as output:
        while True:
            try:
                connection = connection or http.client.HTTPConnection("127.0.0.1", port)
                connection.request("GET", "/next")
            except ConnectionRefusedError:  # it does not listen yet
                connection = None
                time.sleep(0.02)
                continue
            print(connection.getresponse().read().decode(), file=output, flush=True)
            time.sleep(0.05)


call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", byref(memory), 4 * WORDS)
call("cuMemsetD32_v2", memory.value, 7, WORDS)
threading.Thread(target=ask, args=(int(sys.argv[1]), sys.argv[2]), daemon=True).start()
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
