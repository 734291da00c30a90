"""What is read out of a token, and out of what is none."""

from __future__ import annotations

import pytest

from interlock._protocol.names import token_part
from interlock._protocol.tokens import Process, Token
from interlock.primitives.kind import KindReply
from interlock.primitives.lock import owner_prefix

RANDOM = f"{1 << 90:032x}"


@pytest.mark.parametrize("label", ["", "web", "a@b"])
@pytest.mark.parametrize("owner", ["", "job/7 of\nall"])
def test_a_token_says_who_made_it(label, owner):
    process = Process(label, token_part("web-1.example.org"), 4711)
    text = f"{owner_prefix(owner or None)}{process}/{token_part('Thread-1 (work)')}/{RANDOM}"
    assert Token.parse(text) == Token(token_part(owner) if owner else "", process, "Thread-1-work-")
    assert Process.parse(str(process)) == process


@pytest.mark.parametrize(
    "text",
    [
        "", "their id", "3b0e0a52-7c5e-4f6f-8d1c-1f2f3f4f5f6f", f"h/1/t/{RANDOM[1:]}", f"h/1/t/{RANDOM}0",
        f"h/1/{RANDOM}",
        f"h/x/t/{RANDOM}", f"h/{'9' * 11}/t/{RANDOM}", f"h/١/t/{RANDOM}", f"h/1/t/{RANDOM}\n", f"h\n/1/t/{RANDOM}",
        f"h/1/\x1b[31m/{RANDOM}", f"!h/1/t/{RANDOM}", f"a/b/h/1/t/{RANDOM}", f"/1/t/{RANDOM}", "a/b/c/d", "//1//",
        f"@h/1/t/{RANDOM}",
    ],
)  # fmt: skip
def test_nothing_is_read_out_of_a_foreign_text(text):
    assert Token.parse(text) is None
    if not text.startswith("!"):
        assert KindReply(b"", text.encode() or b"x", 0, b"", b"", b"1").kind == "plain key"


def test_a_revoked_token_is_of_interlock():
    assert KindReply(b"", f"!h/1/t/{RANDOM}".encode(), 0, b"", b"", b"1").kind == "lock"


@pytest.mark.parametrize("text", ["no number", "h/", "/1", "\ufffd/1", "h/1\n", "a/h/1", f"h/{'9' * 400}"])
def test_a_foreign_text_is_no_process(text):
    assert Process.parse(text) is None
