"""Tokenizers: text to ids and back, special tokens, chat; a thin wrapper of the `tokenizers` library."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from dovetail.core.errors import UserError
from dovetail.io import tokenizer_files
from dovetail.io.chat import ChatTemplate, has_images
from dovetail.io.detokenize import Detokenizer, byte_characters, token_bytes
from dovetail.io.fewest import Fewest

# Joins punctuation back to its word after WordPiece; order matters.
_CLEANUP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"))
_CLEANUP += ((" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))

_LONG = 4096  # characters, which take some milliseconds

_ORDER = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


class Tokenizer:
    """Convert text to ids and back.

    The backend becomes the tokenizer's own: its truncation and padding are turned off and special tokens are added.

    Args:
        backend: The `tokenizers` pipeline.
        bos, eos, pad, unk: Special tokens as text.
        eos_ids: Further ids that end a generation.
        add_bos, add_eos: Whether `encode` puts them around a text; None for both keeps the backend's own rule.
        chat_template: Jinja source, or several by name ("default", "tool_use").
        extra: The other keys of a tokenizer_config.json, which `save` writes back.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos: str | None = None,
        eos: str | None = None,
        pad: str | None = None,
        unk: str | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ):
        self.backend = backend
        self.bos, self.eos, self.pad, self.unk = bos, eos, pad, unk
        self.add_bos, self.add_eos = add_bos, add_eos
        self.extra = dict(extra or {})
        self.chat_templates = _by_name(chat_template)
        self._prepare_backend()
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (
            None if token is None else self.id(token) for token in (bos, eos, pad, unk)
        )
        first = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids = tuple(dict.fromkeys(self._known([*first, *eos_ids])))

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read a Hugging Face folder: tokenizer.json and, if they exist, the configs and templates beside it.

        BOS and EOS follow tokenizer.json's post-processor; add_bos_token in tokenizer_config.json is not read, as in
        transformers when there is a tokenizer.json. tokenizer.json is also the whole pipeline: for tokenizer_class
        LlamaTokenizer, transformers 5 builds another one, which treats leading spaces differently.
        """
        return cls(**tokenizer_files.read(Path(path)))

    def save(self, folder: str | Path) -> None:
        """Write the files that `from_folder` and transformers' AutoTokenizer read."""
        tokenizer_files.write(self, Path(folder))

    # --- text and ids ---------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the ids of `text`, with BOS and EOS if this tokenizer adds them.

        Special tokens in it become their ids.
        """
        if isinstance(text, str) and len(text) > _LONG:
            return self.encode_batch([text], add_special)[0]  # it releases Python's lock: other threads run meanwhile
        return self.backend.encode(_checked_text(text), add_special_tokens=add_special).ids

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether `text` certainly has more than `most` tokens, without tokenizing it; False if it may not."""
        return self._fewest.exceeds(_checked_text(text), most)

    def encode_batch(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        """Return the ids of each text, computed on all cores."""
        checked = [_checked_text(text) for text in texts]
        return [e.ids for e in self.backend.encode_batch_fast(checked, add_special_tokens=add_special)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of the ids."""
        text = self.backend.decode(self._known(ids), skip_special_tokens=skip_special)
        return _clean_up(text) if self._cleans_up else text

    def decode_batch(self, many: Iterable[Iterable[int]], skip_special: bool = True) -> list[str]:
        """Return the text of each list of ids, computed on all cores.

        Unknown ids, which a model with a padded vocabulary may sample, are left out.
        """
        texts = self.backend.decode_batch([list(ids) for ids in many], skip_special_tokens=skip_special)
        return [_clean_up(text) for text in texts] if self._cleans_up else texts

    def stream(self, skip_special: bool = True, context: Iterable[int] = (), keep: Collection[int] = ()) -> Detokenizer:
        """Return a decoder of ids one at a time.

        Args:
            skip_special: Leave out special tokens.
            context: Ids before the first, such as the prompt's last few.
            keep: Special tokens that are written all the same; a parser of tool calls needs its markers.
        """
        clean = _clean_up if self._cleans_up else None
        special = self.special_ids.difference(keep) if keep else self.special_ids
        return Detokenizer(self.backend, special, skip_special=skip_special, context=context, clean=clean)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token within a text; it may be a part of a character."""
        return token_bytes(self.backend, self.token(token_id), token_id in self.special_ids)

    def token(self, token_id: int) -> str:
        """Return the token with this id as the vocabulary spells it (not decoded)."""
        (token_id,) = self._known([token_id])
        token = self.backend.id_to_token(token_id)
        assert token is not None
        return token

    def id(self, token: str) -> int:
        """Return the id of a token; raise UserError if there is none."""
        found = self.backend.token_to_id(token)
        if found is None:
            raise UserError(f"expected a token of this vocabulary, got {token!r}; for free text use encode()")
        return found

    @cached_property
    def vocab_size(self) -> int:
        """Return one more than the largest id. The model's own may be larger, as it is often padded."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    # --- chat -----------------------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """Return the default chat template, if there is one."""
        return self.chat_templates.get("default")

    def chat(self, tools: Any = None, chat_template: str | None = None) -> ChatTemplate:
        """Return the template to use.

        The one given (a name or Jinja source), else tool_use with tools, else default.
        """
        return ChatTemplate(self.chat_source(tools, chat_template), self.special_tokens)

    def chat_source(self, tools: Any = None, chat_template: str | None = None) -> str:
        """Return the source of the template that `chat` would compile."""
        name = chat_template or ("tool_use" if tools is not None and "tool_use" in self.chat_templates else "default")
        source = self.chat_templates.get(name, chat_template)
        if source is None:
            named = f" (it has {sorted(self.chat_templates)}, and no 'default')" if self.chat_templates else ""
            raise UserError(
                f"this model's tokenizer has no chat template{named}, so messages cannot become a prompt. Put a "
                "chat_template.jinja beside its tokenizer.json or pass chat_template='<Jinja source>'; a base model "
                "takes plain text instead",
                param="chat_template",
            )
        return source

    def with_templates(self, templates: str | Mapping[str, str]) -> Tokenizer:
        """Return a copy with these chat templates instead of its own."""
        found = copy.copy(self)
        found.chat_templates = _by_name(templates)
        return found

    def with_special_tokens(self, tokens: Sequence[str]) -> Tokenizer:
        """Return a copy with these additional special tokens, at the ids after the last one."""
        for token in tokens:
            if not token.strip() or self.backend.token_to_id(token) is not None:
                raise UserError(f"a new special token must be a text that the vocabulary does not have, got {token!r}")
        backend = Backend.from_str(self.backend.to_str())
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
        listed = {"additional_special_tokens": [*tokenizer_files.extra_special_tokens(self.extra), *tokens]}
        kept = {key: value for key, value in self.extra.items() if not (key == "extra_special_tokens" and listed)}
        return Tokenizer(
            backend, bos=self.bos, eos=self.eos, pad=self.pad, unk=self.unk, eos_ids=self.eos_ids, add_bos=self.add_bos,
            add_eos=self.add_eos, chat_template=self.chat_templates, extra=kept | listed,
        )  # fmt: skip

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the text of a prompt; `kwargs` go to the template (see `ChatTemplate.render`)."""
        template = self.chat(tools, chat_template)
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt, **kwargs)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return the ids of a prompt without images. No BOS is added: the template writes its own."""
        if has_images(messages):
            raise UserError(
                "these messages have images, which this model or this command does not take; send text alone",
                param="messages",
            )
        return self.encode(self.apply_chat(messages, tools, add_generation_prompt, **kwargs), add_special=False)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return special tokens by the names of transformers and chat templates.

        Bos_token, eos_token, image_token, ...
        """
        named = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self.unk, "pad_token": self.pad}
        every = tokenizer_files.named_tokens(self.extra) | {key: token for key, token in named.items() if token}
        # transformers' order, which decides the ids of tokens that are new to the vocabulary.
        first = [key for key in _ORDER if key in every]
        return {key: every[key] for key in dict.fromkeys([*first, *every])}

    # --- inside ---------------------------------------------------------------------------------------------------

    def _prepare_backend(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = bool(self.extra.get("split_special_tokens", False))
        self._add_tokens()
        if self.add_bos is not None or self.add_eos is not None:
            self.backend.post_processor = self._post_processor()

    def _add_tokens(self) -> None:
        """Make every named token a special one, whatever tokenizer.json says (as transformers does)."""
        known = {token.content: token for token in self.backend.get_added_tokens_decoder().values()}
        known |= tokenizer_files.added_tokens(self.extra)
        names = self.special_tokens.values()
        for name in [*names, *tokenizer_files.extra_special_tokens(self.extra)]:
            known.setdefault(name, AddedToken(name, special=True))
        for name in names:
            known[name].special = True
        self.backend.add_tokens(list(known.values()))

    def _post_processor(self) -> TemplateProcessing:
        if (self.add_bos and self.bos is None) or (self.add_eos and self.eos is None):
            raise UserError(
                "add_bos and add_eos need the token itself; got True without bos=... or eos=...", param="add_bos"
            )
        bos = [f"{self.bos}:0"] if self.add_bos else []
        eos = [f"{self.eos}:0"] if self.add_eos else []
        ends = [token for token, wanted in ((self.bos, self.add_bos), (self.eos, self.add_eos)) if wanted and token]
        return TemplateProcessing(
            single=[*bos, "$A:0", *eos],
            pair=[*bos, "$A:0", *eos, "$B:1"],
            special_tokens=[(token, self.id(token)) for token in dict.fromkeys(ends)],
        )

    @cached_property
    def _fewest(self) -> Fewest:
        return Fewest(self.backend)

    @cached_property
    def _cleans_up(self) -> bool:
        # transformers ignores the setting for BPE, whose spaces are the text's own.
        wanted = self.extra.get("clean_up_tokenization_spaces", False)
        return bool(wanted) and type(self.backend.model).__name__ != "BPE"

    @cached_property
    def _gaps(self) -> frozenset[int]:
        if self.backend.get_vocab_size() == self.vocab_size:
            return frozenset()
        return frozenset(range(self.vocab_size)) - frozenset(self.backend.get_vocab().values())

    def _known(self, ids: Iterable[int]) -> list[int]:
        """Return the ids as Python ints, and refuse unknown ones, which the library would drop silently."""
        ids = [int(i) for i in ids]
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size or not self._gaps.isdisjoint(ids)):
            bad = next(i for i in ids if not 0 <= i < self.vocab_size or i in self._gaps)
            raise UserError(
                f"expected token ids from 0 to {self.vocab_size - 1} that this tokenizer knows, got {bad}; "
                "do these ids come from another model?"
            )
        return ids


def _clean_up(text: str) -> str:
    for old, new in _CLEANUP:
        text = text.replace(old, new)
    return text


def _checked_text(text: Any) -> str:
    if not isinstance(text, str):
        raise UserError(
            f"expected text to encode, got {type(text).__name__}; decode bytes, or use encode_batch for lists"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"expected valid Unicode, got half a surrogate pair at character {error.start}; "
            "read the text with errors='replace'"
        ) from None
    return text


def _by_name(template: str | Mapping[str, str] | None) -> dict[str, str]:
    if template is None:
        return {}
    return {"default": template} if isinstance(template, str) else dict(template)


MARK = "\ufdef"  # io.chat uses others, from U+FDD0 on


class LiteralText:
    """Tokenize foreign text in a prompt so that it produces no special tokens.

    A tokenizer makes a special token of `<|im_end|>` wherever it occurs, also in a user's text, which could so end its
    turn and begin the system's. Here a mark, one of Unicode's noncharacters, is inserted after the first character of
    each such spelling before a chat template sees the text. What the template writes itself has no mark and becomes
    special tokens; the tokens of the marks are removed after tokenizing, and the rest is tokenized in its context.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # one of a single character cannot be broken by a mark, and is none in practice
        special = [name for token in tokenizer.special_ids if len(name := tokenizer.token(token)) > 1]
        self._spelled = re.compile(f"(?=(?:{'|'.join(map(re.escape, special))}))(.)", re.S) if special else None

    def mark(self, value: Any) -> Any:
        """Return text, or JSON with texts in it, with a mark in each spelling of a special token."""
        if isinstance(value, str):
            if MARK in value:
                raise UserError(f"the text holds U+{ord(MARK):04X}, which is not a character; remove it")
            return self._spelled.sub(rf"\1{MARK}", value) if self._spelled else value
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of a marked text, without those of the marks."""
        if MARK not in text:
            return self._tokenizer.encode(text, add_special)
        # not encode_batch_fast, which gives no offsets; both release Python's lock
        (found,) = self._tokenizer.backend.encode_batch([text], add_special_tokens=add_special)
        tokens, seen = [], set()
        for token, (start, end) in zip(found.ids, found.offsets, strict=True):
            marks = [i for i in range(start, end) if text[i] == MARK]
            seen.update(marks)
            if len(marks) < end - start or start == end:
                if marks:
                    raise UserError(_CANNOT)
                tokens.append(token)
        if len(seen) < text.count(MARK):
            raise UserError(_CANNOT)
        return tokens


_CANNOT = (
    "this model's tokenizer cannot keep special tokens that are spelled in a text apart; remove them from the text"
)


END = "<|end|>"


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are UTF-8 bytes, with 256 for the end of a text.

    It is what `data.tokenizer: bytes` trains with, in the form that an exported folder needs to be served.
    """
    vocab = {letter: byte for byte, letter in enumerate(byte_characters())} | {END: 256}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return Tokenizer(backend, eos=END)
