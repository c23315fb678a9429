"""Widgets that answer while a cell blocks the main shell of the kernel, in the page of the cell and in later ones.

ipykernel 7 has subshells: threads that answer for widgets meanwhile. Without them only an interrupt of the kernel stops
a run, and a page that is opened meanwhile shows no panel.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import Any

from IPython import get_ipython
from ipywidgets import Button, Layout, Widget

# What a page asks a kernel for before it can show a widget, and the comm over which it asks for the state of widgets.
_QUESTIONS = ("kernel_info_request", "comm_info_request")
_CONTROL = "jupyter.widget.control"
_NEEDED = ("shell_channel_thread_main", "_main_asyncio_lock", "_publish_status")  # of ipykernel 7.0 to 7.4


def answer_while_busy(widget: Widget) -> None:
    """Let clicks on ``widget`` reach the kernel while a cell blocks its main shell.

    ipykernel 7 sends them to the shell that last used the widget, which is blocked. This sends them to the subshell of
    the front end.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda _data, default: default


def stop_button(stop: Callable[[], None] | None, tooltip: str) -> Button:
    """A button that calls ``stop``, also while a cell blocks the main shell; hidden without ``stop``."""
    size = Layout(width="70px", height="24px", flex="0 0 auto", visibility="visible" if stop else "hidden")
    button = Button(description="Stop", icon="stop", tooltip=tooltip, layout=size)

    def pressed(_: Button) -> None:
        button.description = "Stopping…"
        if stop is not None:
            stop()

    button.on_click(pressed)
    answer_while_busy(button)
    return button


def show_to_later_pages() -> None:
    """Let a page that is opened while a cell blocks the main shell show the widgets of this kernel.

    A page asks the main shell until it knows of subshells. The thread that dispatches messages to shells answers then.
    """
    kernel: Any = getattr(get_ipython(), "kernel", None)
    if not getattr(kernel, "_supports_kernel_subshells", False) or hasattr(kernel, "_ring_answers"):
        return
    if all(hasattr(kernel, name) for name in _NEEDED):
        kernel._ring_answers = _Answers(kernel)


class _Answers:
    """Replaces ``shell_channel_thread_main`` of ``kernel``, and passes on what it does not answer."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._controls: set[str] = set()  # comms on which pages ask for the state of widgets
        kernel.shell_channel_thread.io_loop.add_callback(lambda: kernel.shell_stream.on_recv(self._take, copy=False))

    async def _take(self, frames: Any) -> None:
        if not self._kernel._main_asyncio_lock.locked() or not await self._answer(frames):
            await self._kernel.shell_channel_thread_main(frames)

    async def _answer(self, frames: Any) -> bool:
        """Answer a question of a page about widgets; returns whether it was one."""
        kernel, session = self._kernel, self._kernel.session
        try:
            senders, parts = session.feed_identities(frames, copy=False)
            header = session.deserialize(parts, content=False, copy=False)
            kind, content = header["header"]["msg_type"], session.unpack(header["content"])
            if kind == "comm_open" and content["target_name"] == _CONTROL:
                self._controls.add(content["comm_id"])
            asks = kind in _QUESTIONS or (kind in ("comm_open", "comm_msg") and content["comm_id"] in self._controls)
            if not asks or header["header"].get("subshell_id") is not None:
                return False
            message = session.deserialize(parts, copy=False)  # once: the second time it counts as a replay
            kernel._publish_status("busy", "shell", parent=message)
            answer = kernel.shell_handlers[kind](kernel.shell_stream, senders, message)
            if isawaitable(answer):
                await answer
            kernel._publish_status("idle", "shell", parent=message)
        except Exception:
            kernel.log.exception("a question about widgets")
            return False
        return True
