import pytest

from makeway.errors import UserError
from makeway.gguf.faults import fault, show


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("blk.0.weight", "blk.0.weight"),
        ("中文", "中文"),
        ("two\nlines", r"two\nlines"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\udcff", r"\udcff"),
        ("x" * 300, "x" * 120 + "..."),
    ],
)
def test_show_keeps_names_on_one_line(text, shown):
    assert show(text) == shown


def test_fault_says_where_and_what_to_do():
    error = fault("m.gguf", "key 'a' appears twice", at=24, do="mend it")
    assert isinstance(error, UserError)
    assert str(error) == "m.gguf: key 'a' appears twice (at byte 24); mend it"
