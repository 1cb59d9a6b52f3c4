"""`xsake serve`: its arguments and what it prints; the dashboard is made elsewhere."""

import os
from pathlib import Path
from typing import Annotated

import typer

from xsake._io import require_local
from xsake._provenance import own_checkout
from xsake.cli.exits import exit_codes
from xsake.errors import ArgumentError, MissingExtraError

NICENESS = 10


def run_serve(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs and documents; default: here.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address; another one needs --token-file.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    token_file: Annotated[
        Path | None, typer.Option(help="File of the token; default: a new one, printed once.")
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Ask for none; on this machine only.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name of the server, such as a proxy's.")
    ] = None,
    showcase: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the built showcase, served at /; default: that of a checkout."
        ),
    ] = None,
    no_showcase: Annotated[
        bool, typer.Option("--no-showcase", help="Serve the page of runs at /.")
    ] = False,
    clients: Annotated[int, typer.Option(min=1, max=1024, help="Of live updates at once.")] = 32,
    requests_per_second: Annotated[
        float, typer.Option(min=1.0, help="Of one address; more are refused.")
    ] = 50.0,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a proxy whose X-Forwarded headers are believed."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder for indexes of runs; default: in the user's cache directory."),
    ] = None,
) -> None:
    """Serve a dashboard of runs, plans, benchmark rows and certificates; it only reads.

    Live metrics, an API with a schema at /api/v1/openapi.json, and /metrics for Prometheus. Exit
    code 0 after Ctrl-C, 2 if it cannot be served so.
    """
    with exit_codes(interrupted="stopped"):
        require_local(*(folders or ()), token_file, showcase, cache)
        _require_server()
        from xsake.server.settings import Settings

        token, is_new = _choose_token(token_file, host, no_token=no_token)
        settings = Settings(
            folders=tuple(folders or [Path()]), host=host, port=port,
            token=token, hosts=tuple(allow_host or ()),
            showcase=None if no_showcase else showcase or _built_showcase(), clients=clients,
            cache=_cache_folder(cache), requests_per_second=requests_per_second,
            trusted_proxies=tuple(trusted_proxy or ()),
        )  # fmt: skip
        _serve(settings, settings.token if is_new else None)


def _require_server() -> None:
    """Raise MissingExtraError unless the server is installed."""
    try:
        import xsake.server.connections  # noqa: F401 (only whether it can be imported)
    except ImportError as error:
        raise MissingExtraError(
            "the server is not installed", got=str(error), fix="pip install 'xsake[serve]'"
        ) from error


def _built_showcase() -> Path | None:
    """What `just showcase` built in the checkout that this code belongs to."""
    checkout = own_checkout()
    built = None if checkout is None else checkout / "showcase" / "out"
    return built if built is not None and (built / "index.html").is_file() else None


def _cache_folder(given: Path | None) -> Path | None:
    """The folder that was named, or the user's; None, and a note, where that cannot be written."""
    from xsake.server.cache import default_folder, make_own_folder

    if given is not None:
        return given
    try:
        return make_own_folder(default_folder())
    except (ArgumentError, RuntimeError) as error:  # RuntimeError: the user has no home
        typer.echo(f"indexes of runs are temporary, --cache keeps them: {error}", err=True)
        return None


def _choose_token(file: Path | None, host: str, *, no_token: bool) -> tuple[str | None, bool]:
    """Return the token, None without one, and whether it is new and has to be shown."""
    from xsake.server.settings import is_loopback, new_token

    if no_token and file is not None:
        raise ArgumentError("--no-token and --token-file exclude each other")
    if file is None:
        is_new = not no_token and is_loopback(host)
        return (new_token() if is_new else None), is_new
    try:
        with file.open(encoding="ascii") as opened:
            return opened.read(1024).strip(), False
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("the token cannot be read", got=file) from error


def _serve(settings, new_token: str | None) -> None:
    """Listen, say where, and serve until Ctrl-C."""
    import uvicorn

    from xsake.server.app import Dashboard
    from xsake.server.connections import make_config

    config = make_config(Dashboard(settings), settings)
    os.nice(NICENESS)  # it gives way to the runs that it watches
    server, listening = uvicorn.Server(config), config.bind_socket()
    address = f"[{config.host}]" if ":" in config.host else config.host
    place = f"http://{address}:{listening.getsockname()[1]}/"
    # After the #, so that browsers send it nowhere: the page trades it for a cookie.
    typer.echo(f"{place}#token={new_token}" if new_token else place)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
