"""`xsake serve`: serve the dashboard."""

import os
from pathlib import Path
from typing import Annotated

import typer

from xsake._io import cache_folder, require_local
from xsake._provenance import checkout_root
from xsake.cli.errors import exit_codes
from xsake.cli.load import import_extra
from xsake.errors import ArgumentError
from xsake.server.settings import ServerSettings

NICENESS = 10
_CACHE = "Folder of the run index; default: in the user's cache directory."
_PROXY = "Address or network of a proxy whose X-Forwarded headers are trusted."
_SHOWCASE = "Folder of the built showcase, served at /; default: the checkout's."


def run_serve(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs and documents; default: .")
    ] = None,
    host: Annotated[str, typer.Option(help="Address; others than loopback need --token-file.")] = (
        ServerSettings.host
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = (
        ServerSettings.port
    ),
    token_file: Annotated[
        Path | None, typer.Option(help="File of the access token; default: a new one is printed.")
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Disable authentication; loopback only.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Additional host name, such as a proxy's.")
    ] = None,
    showcase: Annotated[Path | None, typer.Option(help=_SHOWCASE)] = None,
    no_showcase: Annotated[
        bool, typer.Option("--no-showcase", help="Serve the dashboard at /.")
    ] = False,
    max_clients: Annotated[
        int, typer.Option(min=1, max=1024, help="Maximum number of clients with live updates.")
    ] = ServerSettings.max_clients,
    requests_per_second: Annotated[
        float, typer.Option(min=1.0, help="Rate limit per address.")
    ] = ServerSettings.requests_per_second,
    trusted_proxy: Annotated[list[str] | None, typer.Option(help=_PROXY)] = None,
    cache: Annotated[Path | None, typer.Option(help=_CACHE)] = None,
) -> None:
    """Serve a read-only dashboard of runs, plans, benchmark rows and certificates.

    Live metrics, an API with a schema at /api/v1/openapi.json, and /metrics for Prometheus. Exit
    code 0 after Ctrl-C, 2 if the command cannot run.
    """
    with exit_codes(interrupted="stopped"):
        require_local(*(folders or ()), token_file, showcase, cache)
        import_extra("xsake.server.security", "serve")
        token, is_new = _choose_token(token_file, host, no_token=no_token)
        settings = ServerSettings(
            folders=tuple(folders or [Path()]), host=host, port=port,
            token=token, hosts=tuple(allow_host or ()),
            showcase=None if no_showcase else showcase or _built_showcase(),
            max_clients=max_clients, requests_per_second=requests_per_second,
            cache=_cache_folder(cache), trusted_proxies=tuple(trusted_proxy or ()),
        )  # fmt: skip
        _serve(settings, settings.token if is_new else None)


def _built_showcase() -> Path | None:
    """Return the showcase built by `just showcase` in this checkout."""
    checkout = checkout_root()
    built = None if checkout is None else checkout / "showcase" / "out"
    return built if built is not None and (built / "index.html").is_file() else None


def _cache_folder(given: Path | None) -> Path | None:
    """Return the given folder or the user's; None, with a message, if that is not writable."""
    from xsake.server.cache import make_private_folder

    if given is not None:
        return given
    try:
        return make_private_folder(cache_folder("serve"))
    except (ArgumentError, RuntimeError) as error:  # RuntimeError: the user has no home
        typer.echo(f"the run index is temporary, set --cache to keep it: {error}", err=True)
        return None


def _choose_token(file: Path | None, host: str, *, no_token: bool) -> tuple[str | None, bool]:
    """Return the token, None without one, and whether it is new and has to be shown."""
    from xsake.server.settings import is_loopback, new_token

    if no_token and file is not None:
        raise ArgumentError("token-options", "--no-token and --token-file exclude each other")
    if file is None:
        is_new = not no_token and is_loopback(host)
        return (new_token() if is_new else None), is_new
    try:
        with file.open(encoding="ascii") as opened:
            return opened.read(1024).strip(), False
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("token-file", "the token cannot be read", got=file) from error


def _serve(settings, new_token: str | None) -> None:
    """Listen, print the address, and serve until Ctrl-C."""
    import uvicorn

    from xsake.server.app import Dashboard
    from xsake.server.security import make_config

    config = make_config(Dashboard(settings), settings)
    os.nice(NICENESS)  # lower priority than the runs
    server, listening = uvicorn.Server(config), config.bind_socket()
    address = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{address}:{listening.getsockname()[1]}/"
    # In the fragment, which browsers do not send: the page exchanges it for a cookie.
    typer.echo(f"{url}#token={new_token}" if new_token else url)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
