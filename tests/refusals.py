"""Assert what a refusal says: its class, the parameter at fault and its code. Wording is tested once per family."""

from contextlib import contextmanager

import pytest

from dovetail.core.errors import UserError


@contextmanager
def refuses(param=None, kind=UserError, code=None, naming=""):
    """Expect a UserError whose `param` and `code` are these; yield pytest's record of it.

    `naming`: a value that the sentence must contain, such as a path or the name to use instead.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert isinstance(caught.value, UserError)
    assert (caught.value.param, caught.value.code) == (param, code), str(caught.value)
    assert naming in str(caught.value), str(caught.value)
