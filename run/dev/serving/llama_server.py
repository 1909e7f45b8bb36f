"""llama.cpp's own server, of the package xllamacpp, until it is interrupted: llama_server.py FOLDER PORT

FOLDER is one of run/export.py --format gguf. It needs nothing of llava_ds.
"""

import signal
import sys

import xllamacpp


def main(folder: str, port: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path, params.mmproj.path = f"{folder}/model.gguf", f"{folder}/mmproj.gguf"
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.use_jinja = True  # as llama-server does: the file's chat template
    params.n_parallel, params.n_ctx, params.warmup = 1, 2048, False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait([signal.SIGINT, signal.SIGTERM])


if __name__ == "__main__":
    main(*sys.argv[1:])
