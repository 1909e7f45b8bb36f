"""Run llama.cpp's server from the package xllamacpp until it is interrupted: llama_server.py FOLDER PORT [exact]

FOLDER comes from run/export.py --format gguf. The script doesn't need llava_ds. With exact, keys and values are float32
instead of llama.cpp's default float16, and flash attention is off because it also rounds.
"""

import signal
import sys

import xllamacpp


def main(folder: str, port: str, rounding: str = "default") -> None:
    params = xllamacpp.CommonParams()
    params.model.path, params.mmproj.path = f"{folder}/model.gguf", f"{folder}/mmproj.gguf"
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.use_jinja = True  # like llama-server: use the file's chat template
    params.n_parallel, params.n_ctx, params.warmup = 1, 2048, False
    if rounding == "exact":
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait([signal.SIGINT, signal.SIGTERM])


if __name__ == "__main__":
    main(*sys.argv[1:])
