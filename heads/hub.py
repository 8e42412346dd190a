"""Heads on the Hub: fetched into its cache, sent to it, and its refusals in plain words.

Tokens are those of the environment (HF_TOKEN) or of `hf auth login`; no message holds one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError, first_line

SAFE = ["config.json", "*.safetensors", "*.index.json", "adapter/*.json"]
PICKLED = ["config.json", "*.bin", "*.pt", "*.index.json"]
STALE = ["*.safetensors", "*.bin", "*.pt", "*.index.json", "adapter/*", "recipe.yaml"]
"""What an older head in a repository may have left there, beside what is sent."""
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def is_id(source: object) -> bool:
    """Whether this reads as `user/name`, perhaps with `@revision`."""
    return isinstance(source, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(@.+)?", source) is not None


def fetched(source: str, revision: str | None = None, token: str | None = None) -> Path:
    """The folder of a head in the Hub's cache; pickles are fetched only where there is nothing else.

    Args:
        source: user/name, or user/name@revision.
        revision: branch, tag or commit.
        token: None: the one of the environment or of the login.

    Raises:
        UserError: there is no such head, it may not be read, or the Hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    repo, _, named = source.partition("@")
    revision = revision or named or None
    with plainly(repo, revision):
        folder = Path(snapshot_download(repo, revision=revision, token=token, allow_patterns=SAFE))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repo, revision=revision, token=token, allow_patterns=PICKLED))
    if not folder.is_dir():
        raise UserError(f"{repo}: holds no head, there is neither a config.json nor a file of weights")
    return folder


def login(repo: str) -> str:
    """Who is logged in to the Hub; asked before any work for a repository.

    Raises:
        UserError: nobody, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with plainly(repo, sent=True):
        return str(HfApi().whoami()["name"])


def send(folder: Path, repo: str, *, private: bool = False, revision: str | None = None) -> str:
    """Send a folder to a repository, which is made if need be; what has arrived before is not sent again.

    Args:
        private: of a new repository; one that is public already is refused.
        revision: a branch, which is made if need be.

    Returns:
        The address of the commit.

    Raises:
        UserError: nobody is logged in, the repository may not be written, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with plainly(repo, revision, sent=True):
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise UserError(f"{repo}: exists and is public; make it private on the Hub first, or leave --private out")
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                revision=revision,
                commit_message="Upload a draft head with headstart",
                delete_patterns=STALE,
            ).commit_url
        )


@contextmanager
def plainly(repo: str, revision: str | None = None, sent: bool = False) -> Iterator[None]:
    """Turn what the Hub's client raises into a message for the user.

    Args:
        sent: whether something is being sent, and not fetched.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # its client raises many kinds, of packages that changed their names
        if (said := _words(error, repo, revision)) is None:
            raise
        again = "; nothing is lost: the same command goes on with what has not arrived" if _passing(error) else ""
        raise UserError(f"{repo}: {said}{again}" if sent else f"{repo}: no such folder; on the Hub: {said}") from error


def _words(error: Exception, repo: str, revision: str | None) -> str | None:
    from huggingface_hub import constants, errors, get_token

    chain = [error, *_causes(error)]
    status = next((code for one in chain if (code := _status(one))), None)
    if constants.HF_HUB_OFFLINE and any(isinstance(one, OSError) for one in chain):
        return "HF_HUB_OFFLINE is set, and it is not whole in the Hub's cache; fetch it once while online"
    for kind, words in (
        (errors.GatedRepoError, f"is gated: ask for access at {constants.ENDPOINT}/{repo}, then {_LOGIN}"),
        (
            errors.RepositoryNotFoundError,
            "the Hub has no such repository, or it is private and "
            + ("not open to your token" if get_token() else f"nobody is logged in: {_LOGIN}"),
        ),
        (errors.RevisionNotFoundError, f"has no branch, tag or commit {revision or 'main'}"),
        (errors.LocalTokenNotFoundError, f"nobody is logged in: {_LOGIN}"),
        (errors.HFValidationError, first_line(error)),
    ):
        if any(isinstance(one, kind) for one in chain):
            return words
    if status == 401:
        return f"the Hub does not know your token: {_LOGIN}" if get_token() else f"nobody is logged in: {_LOGIN}"
    if status == 403:
        return f"your token may not write there ({_told(chain)}); it needs the right to write, and the name to be yours"
    if status:
        return f"the Hub answered {status} ({_told(chain)})"
    if _passing(error):
        return f"the Hub at {constants.ENDPOINT} cannot be reached ({first_line(chain[-1])})"
    return first_line(error) if isinstance(error, OSError | ValueError | RuntimeError) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    while (cause := error.__cause__ or error.__context__) is not None:
        yield cause
        error = cause


def _status(error: BaseException) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) else None


def _told(chain: list[BaseException]) -> str:
    """What the Hub itself said, in a line."""
    words = next((str(text) for one in chain if (text := getattr(one, "server_message", None))), "")
    return words.splitlines()[0] if words else "no reason given"


def _passing(error: BaseException) -> bool:
    """Whether trying again may help: the Hub was not reached, or was at fault itself."""
    chain = [error, *_causes(error)]
    status = next((code for one in chain if (code := _status(one))), None)
    if status is not None:
        return status >= 500 or status == 429
    return any(isinstance(one, ConnectionError | TimeoutError) or _transport(one) for one in chain)


def _transport(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in ("httpx", "httpx2", "requests", "hf_xet", "urllib3")
