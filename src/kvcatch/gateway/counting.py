"""Exact prompt tokens: by the model's own tokenizer files where they are readable, by the engine otherwise.

A local count is used only for plain prompts (text, or messages that are a role and text), and only after it gave
the same tokens as the engine for probes; everything else (tools, images, template arguments) is counted by the
engine's ``/tokenize``.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from kvcatch.errors import KVCatchError, missing_extra
from kvcatch.gateway.body import CHAT, RESPONSES, Ask
from kvcatch.gateway.refusal import Refusal

logger = logging.getLogger("kvcatch.gateway")

#: counts kept, by a hash of what was counted
REMEMBERED = 4096
#: texts longer than this are counted in a thread: tokenizing releases the interpreter lock
INLINE_CHARACTERS = 20_000

#: (path, JSON body) -> JSON answer of the engine; raises Refusal when it cannot be had
Post = Callable[[str, dict[str, Any]], Awaitable[Any]]

#: fields of a chat request that change what the template renders
_TEMPLATE_FIELDS = (
    "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "documents", "reasoning_effort", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
_PROBES = (
    [{"role": "user", "content": "What is 17 + 4?"}],
    [
        {"role": "system", "content": "You are terse.\n\n Really. "},
        {"role": "user", "content": "  Ünïcode, emoji 🙂 and\ttabs "},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "<|im_start|> again\n"},
    ],
)


class Counter:
    """Counts prompts for one model. ``local`` is None until its files were found and agreed with the engine."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self.local: LocalTokenizer | None = None
        self._known: OrderedDict[bytes, int] = OrderedDict()

    async def adopt(self, folder: str, model: str) -> bool:
        """Use the tokenizer in ``folder`` if it agrees with the engine on every probe."""
        try:
            local = await asyncio.to_thread(LocalTokenizer, folder)
        except KVCatchError as error:
            logger.info("prompts of %s are counted by the engine: %s", model, error)
            return False
        if local.template is not None:
            for messages in _PROBES:
                if not await self._agrees(local.chat(messages), {"model": model, "messages": messages}):
                    local.template = None
                    logger.warning("chats of %s are counted by the engine: the local template differs", model)
                    break
        text = str(_PROBES[1][1]["content"])
        if not await self._agrees(local.text(text), {"model": model, "prompt": text}):
            logger.warning("prompts of %s are counted by the engine: the local tokenizer differs", model)
            return False
        self.local = local
        return True

    async def _agrees(self, tokens: list[int], body: dict[str, Any]) -> bool:
        try:
            answer = await self._post("/tokenize", body)
        except Refusal:
            return False
        return isinstance(answer, dict) and answer.get("tokens") == tokens

    async def count(self, ask: Ask) -> list[int]:
        """Tokens of every prompt. Raises Refusal when the engine refuses to render it (400) or is gone (502)."""
        found = []
        for prompt in ask.prompts:
            if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
                found.append(len(prompt))
                continue
            key = _key(ask, prompt)
            known = self._known.get(key)
            if known is None:
                known = await self._count(ask, prompt)
                self._known[key] = known
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
            found.append(known)
        return found

    async def _count(self, ask: Ask, prompt: Any) -> int:
        local = self.local
        if isinstance(prompt, str) and ask.route != RESPONSES:
            if local is not None and ask.document.get("add_special_tokens") is None:
                if len(prompt) <= INLINE_CHARACTERS:
                    return len(local.text(prompt))
                return len(await asyncio.to_thread(local.text, prompt))
            wanted: dict[str, Any] = {"model": ask.model or None, "prompt": prompt}
            if ask.document.get("add_special_tokens") is not None:
                wanted["add_special_tokens"] = ask.document["add_special_tokens"]
            return await self._ask_engine(wanted)
        messages = prompt if ask.route == CHAT else as_messages(ask.document, prompt)
        if local is not None and local.template is not None and _plain(ask.document, messages):
            size = sum(len(message["content"]) for message in messages)
            try:
                if size <= INLINE_CHARACTERS:
                    return len(local.chat(messages))
                return len(await asyncio.to_thread(local.chat, messages))
            except KVCatchError:
                pass  # the template refuses these roles: the engine has the last word
        body: dict[str, Any] = {"model": ask.model or None, "messages": messages}
        if ask.route == CHAT:
            body |= template_arguments(ask.document)
        elif isinstance(ask.document.get("tools"), list):
            body["tools"] = [_function(tool) for tool in ask.document["tools"]]
        return await self._ask_engine(body)

    async def _ask_engine(self, body: dict[str, Any]) -> int:
        answer = await self._post("/tokenize", {k: v for k, v in body.items() if v is not None})
        count = answer.get("count") if isinstance(answer, dict) else None
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise Refusal(502, "upstream", "The engine's /tokenize gave no count.")
        return count


def template_arguments(document: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat request as ``/tokenize`` wants them: the rest travels as template arguments."""
    found = {name: document[name] for name in _TEMPLATE_FIELDS if document.get(name) is not None}
    more = {name: found.pop(name) for name in ("documents", "reasoning_effort") if name in found}
    given = document.get("chat_template_kwargs")
    if isinstance(given, dict) or more:
        kwargs = {**more, **(given if isinstance(given, dict) else {})}
        if "reasoning_effort" in more:
            kwargs.setdefault("enable_thinking", more["reasoning_effort"] != "none")
        found["chat_template_kwargs"] = kwargs
    return found


def as_messages(document: dict[str, Any], given: Any) -> list[dict[str, Any]]:
    """The input of ``/v1/responses`` as chat messages.

    Raises Refusal (400) for what only the engine can resolve: stored responses and unknown items.
    """
    if document.get("previous_response_id") is not None:
        raise Refusal(
            400,
            "unsupported",
            "previous_response_id lives in one engine; send the whole conversation instead.",
        )
    messages: list[dict[str, Any]] = []
    instructions = document.get("instructions")
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and isinstance(item.get("role"), str):
            messages.append({"role": item["role"], "content": _parts(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name", ""), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id", ""),
                    "content": str(item.get("output", "")),
                }
            )
        else:
            raise Refusal(400, "unsupported", "An item of input has a type that cannot be counted here.")
    return messages


def _parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": part.get("text", "")})
        elif isinstance(part, dict) and part.get("type") == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url", "")}})
        else:
            raise Refusal(400, "unsupported", "A part of the input has a type that cannot be counted here.")
    return parts


def _function(tool: Any) -> Any:
    """A tool of ``/v1/responses`` in the shape of chat completions."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        inner = {
            k: tool[k] for k in ("name", "description", "parameters", "strict") if tool.get(k) is not None
        }
        return {"type": "function", "function": inner}
    return tool


def _plain(document: dict[str, Any], messages: list[dict[str, Any]]) -> bool:
    """Whether a chat is only roles and text, so that our rendering is the engine's."""
    return all(document.get(name) is None for name in _TEMPLATE_FIELDS) and all(
        message.keys() == {"role", "content"} and isinstance(message["content"], str)
        and isinstance(message["role"], str)
        for message in messages
    )  # fmt: skip


def _key(ask: Ask, prompt: Any) -> bytes:
    context = [ask.route, ask.model, prompt]
    context += [ask.document.get(name) for name in (*_TEMPLATE_FIELDS, "instructions")]
    return hashlib.blake2b(msgspec.json.encode(context), digest_size=16).digest()


class LocalTokenizer:
    """``tokenizer.json`` and the chat template of a model folder. Raises KVCatchError when they are not usable."""

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise KVCatchError(f"no tokenizer.json in {path.name}.", "Give a folder with --tokenizer.")
        try:
            import tokenizers
        except ImportError:
            raise missing_extra("tokenizers", "gateway") from None
        try:
            self._model = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise KVCatchError(f"{file.name} is not a tokenizer.") from error
        self._model.no_truncation()
        self._model.no_padding()
        self.template = _chat_template(file.parent)

    def text(self, text: str) -> list[int]:
        """Token ids of a plain prompt, special tokens added as the tokenizer says."""
        return list(self._model.encode(text).ids)

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a rendered chat with its generation prompt. Raises KVCatchError."""
        if self.template is None:
            raise KVCatchError("this tokenizer has no chat template.")
        return list(self._model.encode(self.template(messages), add_special_tokens=False).ids)


def _chat_template(folder: Path) -> Callable[[list[dict[str, Any]]], str] | None:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        config = {}
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {row.get("name"): row.get("template") for row in source if isinstance(row, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    special = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            special[name] = content
    return compile_template(source, special)


def compile_template(source: str, special: dict[str, str]) -> Callable[[list[dict[str, Any]]], str]:
    """A chat template as Hugging Face renders it, with the generation prompt. Raises KVCatchError."""
    try:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise missing_extra("jinja2", "gateway") from None

    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    def dump(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = dump
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise KVCatchError("the chat template does not compile.") from error

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return str(template.render(messages=messages, add_generation_prompt=True, **special))
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise KVCatchError("the chat template refuses these messages.") from error

    return render
