"""Start the app: take the address, say where it is, and answer until told to stop."""

import os
import secrets
import threading
from contextlib import closing
from pathlib import Path

from rich.console import Console

from penjing.base.errors import UserError, import_extra
from penjing.workflows.serve import is_loopback, listen, shown_host


def start(folder: Path, host: str, port: int, console: Console) -> None:
    """Serve until SIGTERM or SIGINT. Raises UserError for a folder or an address that cannot be used."""
    for module in ("fastapi", "httptools", "uvicorn"):
        import_extra(module, "serve")
    from penjing.serve.connection import make_server
    from penjing.ui import plan
    from penjing.ui.app import make_app
    from penjing.ui.site import Site

    if not folder.is_dir():
        raise UserError("no such folder", where=folder)
    os.chdir(folder)  # settings are resolved as a command in the folder would
    token = secrets.token_urlsafe(24)
    site = Site(Path(), lambda: server.should_exit)
    server = make_server(make_app(site, token, loopback_only=is_loopback(host)))
    with closing(listen(host, port)) as listener:
        threading.Thread(target=plan.load, daemon=True).start()
        address = f"http://{shown_host(host)}:{listener.getsockname()[1]}"
        console.print(f"{address}/#token={token}", highlight=False, soft_wrap=True)
        console.print(
            "Whoever has this address can start programs here: keep it to yourself. Ctrl-C stops the page; runs go on.",
            highlight=False,
            soft_wrap=True,
        )
        server.run(sockets=[listener])
    console.print("stopped", highlight=False)
