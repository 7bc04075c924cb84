"""What may enter generated source: names of a closed alphabet and finite numbers, nothing else.

Whatever a file says is checked by these where it is read, and by the same once more where source
is written: no generator pastes text that has not passed here.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from tilewise.errors import ExpressionError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_WORD = re.compile(r"[A-Za-z0-9_]{1,128}")
_PLAIN = re.compile(r"[^A-Za-z0-9 _.,:;()+-]")


def identifier(text: Any) -> str:
    """`text` where it is a name that C and Python take; raises where it is not."""
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise ExpressionError(
            f"{_shown(text)} is not a valid name: use letters, digits and _, not starting with a "
            "digit, 128 at most"
        )
    return text


def word(text: Any) -> str:
    """`text` where it can be part of a name, as the words of a text field are."""
    if not isinstance(text, str) or not _WORD.fullmatch(text):
        raise ExpressionError(
            f"{_shown(text)} is not a valid word: use letters, digits and _, 128 at most"
        )
    return text


def number(value: Any) -> str:
    """A finite number as C, C++ and Python write it."""
    if not isinstance(value, int | float) or not isfinite(value):
        raise ExpressionError(f"{_shown(value)} is not a finite number")
    return repr(value if type(value) is int else float(value))


def comment(text: str) -> str:
    """`text` for a comment of one line: signs that might end it become `_`."""
    return _PLAIN.sub("_", text)[:200]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
