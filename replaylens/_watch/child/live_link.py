"""How a person gets to the live page: a line to print, and HTML for a notebook.

In: the address of the page, the environment. Out: text. Only the standard library: both processes import this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from urllib.parse import urlsplit

ELSEWHERE = ("SSH_CONNECTION", "SSH_CLIENT", "JUPYTERHUB_USER", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")


def is_elsewhere(environment: Mapping[str, str] = os.environ) -> bool:
    """True if the person probably sits at another machine than the one that this runs on."""
    return any(environment.get(name) for name in ELSEWHERE)


def link_text(url: str, asked: int | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """What to print: the address, and how to reach it from another machine.

    >>> print(link_text("http://127.0.0.1:8123/?token=x", environment={}))
    watching: http://127.0.0.1:8123/?token=x
    """
    lines = [f"watching: {url}"]
    if (port := urlsplit(url).port) and asked not in (None, 0, port):
        lines.append(f"  (port {asked} is taken)")
    if is_elsewhere(environment):
        lines.append(f"  from your own machine, first:  {tunnel(url, environment)}")
    return "\n".join(lines)


def tunnel(url: str, environment: Mapping[str, str] = os.environ) -> str:
    """The command that brings the page's port to another machine.

    >>> tunnel("http://127.0.0.1:8123/?token=x", {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.4 22", "USER": "ada"})
    'ssh -N -L 8123:127.0.0.1:8123 ada@10.0.0.4'
    """
    port = urlsplit(url).port
    _, _, host, ssh_port = (environment.get("SSH_CONNECTION", "").split() + [""] * 4)[:4]
    user = environment.get("USER", "")
    where = f"{user}@{host}" if user and host else host or "THIS-MACHINE"
    return f"ssh -N -L {port}:127.0.0.1:{port} {where}" + (f" -p {ssh_port}" if ssh_port not in ("", "22") else "")


def link_html(url: str, height: int = 640, environment: Mapping[str, str] = os.environ) -> str:
    """For a notebook: the link, and the page itself where the notebook's browser is on this machine."""
    link = f'<p>Watching: <a href="{escape(url)}" target="_blank" rel="noreferrer">{escape(url)}</a></p>'
    if is_elsewhere(environment):
        return link + f"<p>From your own machine, first: <code>{escape(tunnel(url, environment))}</code></p>"
    frame = f'src="{escape(url)}" title="Live page of the run" width="100%" height="{height}"'
    return (
        link + f'<iframe {frame} style="border: 1px solid #8888; border-radius: 6px" allow="clipboard-write"></iframe>'
    )
