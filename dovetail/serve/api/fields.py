"""Body: the base of every request body. An unknown field is refused with a suggestion, and a field that changes answers
elsewhere and cannot here is refused with the reason. One that changes no answer is ignored, and the log says so once.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from dovetail.core.errors import UserError
from dovetail.serve.errors import bad

log = logging.getLogger(__name__)
_noted: set[str] = set()  # ignored fields that the log has already

# JSON's own types: "5" is not a number, and 1 is not a flag. Integers of 64 bits fit in a message to the engine.
Int = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)]
Num = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Token = Annotated[int, Strict(), Field(ge=0, le=2**31 - 1)]


def _at_most(count: int, size: int) -> Callable[[str | list[str]], str | list[str]]:
    """Return a check of one text or several: at most `count`, each of at most `size` characters."""

    def check(given: str | list[str]) -> str | list[str]:
        texts = [given] if isinstance(given, str) else given
        if len(texts) > count:
            raise UserError(f"expected at most {count} strings, got {len(texts)}")
        if (longest := max(map(len, texts), default=0)) > size:
            raise UserError(f"expected strings of at most {size} characters, got one of {longest}")
        return given

    return check


# Each stop string is compared with each new token's text, and each bad word is tokenized and compared at each step.
Stops = Annotated[str | list[str], AfterValidator(_at_most(16, 256))]
StopList = Annotated[list[str], AfterValidator(_at_most(16, 256))]
Words = Annotated[str | list[str], AfterValidator(_at_most(64, 256))]


class Refused(NamedTuple):
    """Why a known field is not supported here, and the values that ask for nothing and are therefore accepted."""

    why: str
    accepted: tuple[Any, ...] = ()


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=False)
    refused: ClassVar[Mapping[str, Refused]] = {}
    ignored: ClassVar[Mapping[str, str]] = {}  # with the reason why no answer depends on it

    def need(self, name: str, where: str) -> Any:
        """The value of a field that is required for this kind of body."""
        value = getattr(self, name)
        if value is None:
            raise bad(f"{where}.{name} is missing", f"{where}.{name}", "missing_required_parameter")
        return value

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in data.items() if cls._is_given(name, value, known)}

    @classmethod
    def _is_given(cls, name: Any, value: Any, known: set[str]) -> bool:
        if name in known:
            return value is not None or name in cls.required()  # null asks for the default
        if name in cls.ignored:
            if value is not None:
                _note_ignored(name, cls.ignored[name])
            return False
        if name in cls.refused:
            why, accepted = cls.refused[name]
            if value is None or any(value == each and type(value) is type(each) for each in accepted):
                return False
            raise PydanticCustomError("refused_field", "{name} is not supported: {why}", {"name": name, "why": why})
        close = difflib.get_close_matches(str(name), [*known, *cls.refused, *cls.ignored], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        shown = str(name)[:64].encode("utf-8", "replace").decode()
        raise PydanticCustomError("unknown_field", "unknown field {name}{hint}", {"name": shown, "hint": hint})

    @classmethod
    def required(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}


def _note_ignored(name: str, why: str) -> None:
    if name not in _noted:
        _noted.add(name)
        log.warning("requests with the field %r: it is ignored, because %s (said once)", name, why)
