"""What torch complains about: kept from a user who asked for axes, or told in one line that says what to do."""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator

REMEDIES = {
    "data-dependent": "its control flow depends on values: use torch.where, or keep that part out of forward",
    "required positional argument": "give all arguments of forward, as a tuple or by name",
    "were given": "a batch of (inputs, labels)? Give the inputs only",
    "'indices'": "does it take integers? Give an integer tensor, e.g. --input 2x20:int64:1000",
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's own warnings and logs about tracing from a user who asked for axes."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def one_line(error: BaseException) -> str:
    """The first telling line of an exception's message, with the user's line of code where there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    text = text if len(text) <= 240 else text[:237] + "..."
    places = re.findall(r'File "([^"]+)", line (\d+), in forward', str(error))
    own = [place for place in places if "/torch/" not in place[0]]
    text = f"{text} ({own[-1][0].rpartition('/')[2]} line {own[-1][1]})" if own else text
    return text + next((f"; {remedy}" for said, remedy in REMEDIES.items() if said in str(error).lower()), "")
