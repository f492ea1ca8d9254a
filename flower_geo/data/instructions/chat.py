"""Conversations as token ids, and which of them the assistant said.

What is said is found by the ``{% generation %}`` markers of the chat template.
Where a template has none, the prompt is tokenised alone: when its ids begin the
ids of the whole, the rest is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flower_geo.data.instructions.forms import Conversation, Dropped
from flower_geo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["PLAIN", "Chat", "Encoded", "chat_template_of"]

#: For tokenizers that bring no template: a role a line, the end-of-text token after answers.
PLAIN = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- 'Assistant:\n' -}}"
    "{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}"
    "{{- '\n' -}}"
    "{%- else -%}"
    "{{- message['role'] | capitalize + ':\n' + message['content'] + '\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:\n' -}}{%- endif -%}"
)

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_template_of(tokenizer: PreTrainedTokenizerFast) -> str:
    """The Jinja chat template that is used with a tokenizer: its own, or `PLAIN`.

    Sites that must agree on a template compare a hash of this text.

    Raises:
        DataError: the tokenizer has several templates and none is its default.
    """
    if not tokenizer.chat_template:
        return PLAIN
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise DataError(
            "the tokenizer has several chat templates and no default one: set its chat_template "
            "to the one that is meant"
        ) from error


@dataclass(frozen=True)
class Encoded:
    """A conversation as ids.

    Attributes:
        ids: token ids of the whole.
        said: for each id, whether the assistant said it; the first is never said.
    """

    ids: list[int]
    said: list[bool]


class Chat:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.template = chat_template_of(tokenizer)
        # The offsets that markers need are known to fast tokenizers only.
        self._by_markers = bool(_MARKED.search(self.template)) and tokenizer.is_fast
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._control = _control_tokens(tokenizer, self.template)

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded | Dropped]:
        """Ids and masks, one a conversation, or why it is left out.

        A conversation whose text spells a control token of the template is left
        out: as a token it would end or open a turn from within.

        Raises:
            DataError: the template refuses a conversation, or has no markers and
                does not render a prompt as the beginning of the whole.
        """
        clean = [c for c in conversations if not self._spells_control(c)]
        done = iter(self._marked(clean) if self._by_markers else self._prefixed(clean))
        return [
            Dropped("control token in the text") if self._spells_control(c) else next(done)
            for c in conversations
        ]

    def prompts(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Ids up to where the assistant's last turn begins, as one asks for it."""
        asked = [(c, c.messages[:-1]) for c in conversations]
        return [ids for ids, _ in self._tokens(asked, ask=True)]

    def _marked(self, conversations: Sequence[Conversation]) -> list[Encoded | Dropped]:
        whole = self._tokens([(c, c.messages) for c in conversations], mask=True)
        return [Encoded(ids, [False, *map(bool, mask[1:])]) for ids, mask in whole]

    def _prefixed(self, conversations: Sequence[Conversation]) -> list[Encoded | Dropped]:
        whole = self._tokens([(c, c.messages) for c in conversations])
        turns = [
            (number, turn)
            for number, c in enumerate(conversations)
            # An opening turn of the assistant answers nothing.
            for turn in range(1, len(c.turns))
            if c.turns[turn][0] == "assistant"
        ]
        of = [conversations[number] for number, _ in turns]
        befores = self._tokens(
            [(c, c.messages[:turn]) for c, (_, turn) in zip(of, turns, strict=True)], ask=True
        )
        untils = self._tokens(
            [(c, c.messages[: turn + 1]) for c, (_, turn) in zip(of, turns, strict=True)]
        )
        found: list[Encoded | Dropped] = [Encoded(ids, [False] * len(ids)) for ids, _ in whole]
        for (number, turn), (before, _), (until, _) in zip(turns, befores, untils, strict=True):
            ids = whole[number][0]
            here = found[number]
            if isinstance(here, Dropped):
                continue
            if ids[: len(before)] != before or ids[: len(until)] != until:
                self._check_template(conversations[number], turn)
                found[number] = Dropped("a token crosses the answer's start")
                continue
            start, end = max(len(before), 1), self._turn_end(ids, len(before), len(until))
            here.said[start:end] = [True] * (end - start)
        return found

    def _turn_end(self, ids: list[int], start: int, end: int) -> int:
        """Where a turn's last special token stands: blanks after it are nobody's words."""
        last = max((at for at in range(start, end) if ids[at] in self._special), default=end)
        if last < end and not str(self._tokenizer.decode(ids[last + 1 : end])).strip():
            return last + 1
        return end

    def _check_template(self, conversation: Conversation, turn: int) -> None:
        """Tell a template that renders a prompt otherwise from tokens that merely merge."""
        texts = [
            self._render(conversation, messages, ask)
            for messages, ask in (
                (conversation.messages[:turn], True),
                (conversation.messages[: turn + 1], False),
                (conversation.messages, False),
            )
        ]
        if not (texts[2].startswith(texts[0]) and texts[2].startswith(texts[1])):
            raise DataError(
                f"the chat template does not render {conversation.where} up to turn {turn} as the "
                "beginning of the whole, and has no {% generation %} markers: put them around the "
                "answer in the tokenizer's chat_template, to say what is trained on"
            )

    def _render(self, conversation: Conversation, messages: list[dict[str, str]], ask: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    chat_template=self.template,
                    add_generation_prompt=ask,
                    tokenize=False,
                )
            )
        # Templates refuse with Jinja's errors, and fail with any of Python's.
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise DataError(
                f"the tokenizer's chat template refuses {conversation.where}: {reason}; change "
                "the row's roles, or the template"
            ) from error

    def _tokens(
        self,
        asked: Sequence[tuple[Conversation, list[dict[str, str]]]],
        *,
        ask: bool = False,
        mask: bool = False,
    ) -> list[tuple[list[int], list[int]]]:
        """Ids, and the markers' mask where it is asked for, of many lists of messages."""
        if not asked:
            return []
        try:
            found: Any = self._tokenizer.apply_chat_template(
                [messages for _, messages in asked],
                chat_template=self.template,
                add_generation_prompt=ask,
                return_dict=True,
                return_assistant_tokens_mask=mask,
                # Lengths are this package's business: no word about the model's limit.
                tokenizer_kwargs={"verbose": False},
            )
        except Exception:
            for conversation, messages in asked:
                self._render(conversation, messages, ask)
            raise
        ids = [list(row) for row in found["input_ids"]]
        masks = found["assistant_masks"] if mask else [[]] * len(ids)
        return list(zip(ids, masks, strict=True))

    def _spells_control(self, conversation: Conversation) -> bool:
        return self._control is not None and any(
            self._control.search(text) for _, text in conversation.turns
        )


def _control_tokens(tokenizer: PreTrainedTokenizerFast, template: str) -> re.Pattern[str] | None:
    """Finds special tokens, and other added tokens that the template itself writes."""
    added = tokenizer.added_tokens_decoder.values()
    tokens = {token.content for token in added if token.special or token.content in template}
    tokens |= set(tokenizer.all_special_tokens)
    spelled = sorted(re.escape(token) for token in tokens if token.strip())
    return re.compile("|".join(spelled)) if spelled else None
