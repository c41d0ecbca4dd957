"""Chat templates, which turn messages into the text that the model of a tokenizer expects.

A template is Jinja. It is in `chat_template.jinja` or in `tokenizer_config.json`, beside
tokenizer.json, and it is rendered as transformers renders it, in Jinja's sandbox. It cannot ask for
the date, so the same messages always have the same tokens.
"""

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any, NoReturn

from train.data.errors import DataError
from train.data.records import shortened
from train.data.regular import read_regular
from train.data.tokenizer import HuggingFaceTokenizer, token_text

_FILE_BYTES = 1 << 24


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages, each an object with a role."""
    return isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value)


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special tokens that it may write.

    Attributes:
      text: The template.
      tokens: Special tokens by the names that templates use.
    """

    text: str
    tokens: tuple[tuple[str, str | tuple[str, ...]], ...] = ()

    def texts(
        self,
        prompt: list[Any],
        answers: dict[str, list[Any]],
        where: str,
        *,
        tools: list[Any] | None = None,
    ) -> tuple[bytes, ...]:
        """The prompt and the answers that may follow it, as text.

        The prompt ends with the tokens that begin an answer. An answer is what the template adds to
        that if the answer is there.

        Args:
          prompt: Messages, one at least.
          answers: Lists of messages by the names of their fields.
          where: Place of the record, for messages.
          tools: Descriptions of the functions that an answer may call.

        Raises:
          DataError: A message has no content, or the messages cannot be rendered.
        """
        for message in itertools.chain(prompt, *answers.values()):
            # A template writes None as a word, and nothing in the place of a missing content.
            content = message.get("content")
            if not isinstance(content, str | list):
                raise DataError(
                    f"{where}: 'content' of a message of {message['role']!r} is "
                    f"{shortened(content)}, not a text; repair or remove the record"
                )
        begin = self._render(prompt, where, tools, begin_answer=True)
        texts = [begin]
        for name, answer in answers.items():
            whole = self._render(prompt + answer, where, tools, begin_answer=False)
            if not whole.startswith(begin) or whole == begin:
                raise DataError(
                    f"{where}: the chat template does not put {name!r} after the prompt: it writes "
                    f"{begin[-40:]!r} at the end of the prompt; write texts in place of messages"
                )
            texts.append(whole[len(begin) :])
        return tuple(text.encode() for text in texts)

    def _render(
        self, messages: list[Any], where: str, tools: list[Any] | None, *, begin_answer: bool
    ) -> str:
        try:
            import jinja2
        except ImportError as error:
            raise DataError(
                f"{where}: messages need jinja2; run `pip install jinja2`, or write texts in place "
                "of messages"
            ) from error
        try:
            template = _compiled(self.text)
        except jinja2.TemplateError as error:
            raise DataError(
                f"{where}: the chat template beside the tokenizer is malformed: {error}; repair "
                "it, or write texts in place of messages"
            ) from error
        try:
            text = template.render(
                messages=messages,
                add_generation_prompt=begin_answer,
                tools=tools,
                documents=None,
                **dict(self.tokens),
            )
            text.encode()  # raises if the text has half of a surrogate pair
            return text
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"{where}: the chat template cannot write these messages ({error}); repair them, "
                "or write texts in place of messages"
            ) from error


@functools.cache
def _compiled(text: str) -> Any:
    """The template, with the settings and functions that it has in transformers."""
    import jinja2.ext
    import jinja2.sandbox
    from jinja2 import nodes

    class Generation(jinja2.ext.Extension):
        """Renders what is between the tags generation and endgeneration, which mark an answer."""

        tags = {"generation"}  # noqa: RUF012, the name and type are those of jinja2

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(text)


def load_chat_template(tokenizer: HuggingFaceTokenizer) -> ChatTemplate | None:
    """The chat template beside a tokenizer; None if there is none.

    Raises:
      DataError: A file that may have the template cannot be read.
    """
    text = _text_beside(tokenizer.path, tokenizer.config)
    if text is None:
        return None
    tokens = _special_tokens(tokenizer.config)
    for name, index in {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}.items():
        tokens[name] = tokenizer.token(index) or ""
    return ChatTemplate(text, tuple(tokens.items()))


def _special_tokens(config: dict[str, Any]) -> dict[str, str | tuple[str, ...]]:
    """The special tokens of a tokenizer_config.json, which transformers gives to templates."""
    tokens: dict[str, str | tuple[str, ...]] = {
        name: token
        for name, value in config.items()
        if name.endswith("_token") and (token := token_text(value)) is not None
    }
    more = config.get("additional_special_tokens")
    if isinstance(more, list):
        tokens["additional_special_tokens"] = tuple(
            text for text in map(token_text, more) if text is not None
        )
    return tokens


def _text_beside(path: Path, config: dict[str, Any]) -> str | None:
    """The text of a template, from one of the two files that may have it."""
    template = path.with_name("chat_template.jinja")
    try:
        return read_regular(template, _FILE_BYTES).decode()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise DataError(f"{template} cannot be read: {error}; repair or remove it") from error
    found = config.get("chat_template")
    if isinstance(found, list):  # several templates with names
        named = {entry.get("name"): entry for entry in found if isinstance(entry, dict)}
        found = named.get("default", {}).get("template")
    return found if isinstance(found, str) else None
