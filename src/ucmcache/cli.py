"""The `ucmcache` command. What a command needs is imported when it runs, so that help stays fast."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Keeps the computed prefixes of hybrid models.")


@app.command()
def version() -> None:
    """Print the version."""
    from ucmcache import __version__

    typer.echo(__version__)


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint's folder in place of the random demo model; needs no tokenizer.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file too.")] = None,
    document_tokens: Annotated[int, typer.Option(min=1, help="Length of the document.")] = 8000,
    keep: Annotated[
        Path | None, typer.Option(help="Work in this folder and leave the model and the saved prefixes there.")
    ] = None,
) -> None:
    """Compute a long document, restart the engine, and show what the restart cost.

    Ends with 0 if every output is the one plain vLLM computes and something was resumed, 1 if not, and 2 if an engine
    could not be run.
    """
    from ucmcache.demo.run import Settings, run_demo

    raise typer.Exit(run_demo(Settings(model=model, document_tokens=document_tokens, keep=keep, json_file=json_file)))
