"""Hold conversations about images in a local browser, with gradio and without contacting other machines."""

import html
import mimetypes
import os
import queue
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import FileRef, Media
from llava_ds.extensions.infer.chat import Conversation, ask, print_note, read_media, speed_line
from llava_ds.extensions.infer.infer_flags import Sampling
from llava_ds.extensions.infer.load import LoadedModel
from llava_ds.extensions.infer.local_server import ADDRESS, listening, make_server

MAX_FILE_SIZE = "100mb"
ERROR = "error"  # title of an error message in the conversation
# Hide gradio's button that uploads an image to gradio's site, because the policy below blocks the upload.
STYLE = 'button[aria-label="Share"] { display: none !important }'

# Keep the browser from contacting other servers, even if gradio's pages or the model's answers contain links.
POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; form-action 'self'; base-uri 'self'"
)


def import_gradio() -> ModuleType:
    """Import gradio with its telemetry off. Raises ConfigError if it is not installed."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio reads it when it is imported
    try:
        import gradio
    except ImportError as error:
        raise ConfigError(f"--web needs gradio ({error}): pip install 'llava_ds[demo]'") from error
    return gradio


def serve(loaded: LoadedModel, name: str, sampling: Sampling, port: int, quiet: bool = False) -> None:
    """Serve the page until Ctrl-C. name: the page's title. Raises ConfigError if the port is taken."""
    with tempfile.TemporaryDirectory(prefix="llava_ds-web-") as uploads, listening(port) as listener:
        os.environ["GRADIO_TEMP_DIR"] = uploads
        gr = import_gradio()
        app = _application(gr, build_page(gr, loaded, name, sampling, quiet), port)
        make_server(app, f"http://{ADDRESS}:{port}/").run(sockets=[listener])


def _application(gr: ModuleType, page, port: int):
    """Mount the page with checks of hosts and content. page.launch() isn't used because it contacts gradio's server."""
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Policy)
    # Against DNS rebinding, refuse other host names that resolve to this address.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[ADDRESS, "localhost"])
    return gr.mount_gradio_app(
        app,
        page,
        path="/",
        server_name=ADDRESS,
        server_port=port,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        max_file_size=MAX_FILE_SIZE,
        css=STYLE,
        # Use system fonts, because gradio's default fonts are loaded from another server.
        theme=gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
    )


class _Policy:
    """Adds the content policy to every response."""

    def __init__(self, app) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        async def with_policy(message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self.app(scope, receive, with_policy)


def build_page(gr: ModuleType, loaded: LoadedModel, name: str, sampling: Sampling, quiet: bool):
    """Build the page: the model's name, a conversation, and a box for questions, images and videos."""
    turn = threading.Lock()  # the model answers one question at a time

    def respond(message: dict, history: list[dict]) -> Iterator[object]:
        text = (message.get("text") or "").strip()
        try:
            conversation = conversation_of(history).with_question(
                text, [read_media(_kind(path), path, loaded) for path in message.get("files") or []]
            )
            if not text:
                raise DataError("the question is empty: type one")
            with turn:
                yield from _pieces(loaded, conversation, sampling, quiet)
        except (DataError, ConfigError) as error:
            yield {"role": "assistant", "content": str(error), "metadata": {"title": ERROR}}

    box = gr.MultimodalTextbox(
        file_types=["image", "video"], file_count="multiple", sources=["upload"], placeholder="A question"
    )
    # Answers are shown as plain text, without markup and links.
    shown = gr.Chatbot(
        render_markdown=False,
        height="70vh",
        label="conversation",
        buttons=["copy", "copy_all"],
        placeholder="Attach an image, and ask about it.",
    )
    description = f"{loaded.model.config.model_type}, template {loaded.version}, on {loaded.device}"
    return gr.ChatInterface(
        respond,
        multimodal=True,
        chatbot=shown,
        textbox=box,
        title=html.escape(name),
        description=f"<p style='text-align: center'>{html.escape(description)}</p>",
        analytics_enabled=False,
        flagging_mode="never",
        api_visibility="private",
        concurrency_limit=1,
    )


def conversation_of(history: list[dict]) -> Conversation:
    """Return the conversation on the page, without questions that got an error or no answer.

    Tabs and common indentation are lost, because gradio removes them from the texts that it shows and sends back.
    """
    conversation, texts, files = Conversation(), [], []
    for message in history:
        parts = message["content"]
        parts = [parts] if isinstance(parts, (str, dict)) else parts
        parts_text = [part if isinstance(part, str) else part.get("text", "") for part in parts if _path(part) is None]
        if message["role"] == "user":
            texts += parts_text
            files += [path for part in parts if (path := _path(part)) is not None]
            continue
        if (message.get("metadata") or {}).get("title") != ERROR and texts:
            conversation = conversation.with_question("\n".join(texts).strip(), [_media(path) for path in files])
            conversation = conversation.with_answer("".join(parts_text))
        texts, files = [], []
    return conversation


def _pieces(loaded: LoadedModel, conversation: Conversation, sampling: Sampling, quiet: bool) -> Iterator[str]:
    """Yield the answer so far after each new piece. Generation stops when the client disconnects."""
    pieces: queue.Queue = queue.Queue()
    stop = threading.Event()

    def work() -> None:
        try:
            reply = ask(loaded, conversation, sampling, pieces.put, stop.is_set)
            if not quiet:
                print_note(speed_line(reply))
            pieces.put(None)
        except BaseException as error:  # raised in the page's own thread
            pieces.put(error)

    worker = threading.Thread(target=work)
    worker.start()
    text = ""
    try:
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            text += piece
            yield text
        if not text:
            yield text
    finally:
        stop.set()
        worker.join()


def _path(part: object) -> str | None:
    """Return the file path of a message's part; None for text."""
    if not isinstance(part, dict):
        return None
    file = part.get("file") or part
    return file.get("path") if isinstance(file, dict) else None


def _kind(path: str) -> str:
    return "video" if (mimetypes.guess_type(path)[0] or "").startswith("video/") else "image"


def _media(path: str) -> Media:
    return Media(_kind(path), (FileRef(str(Path(path))),))
