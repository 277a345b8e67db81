"""Shortening keeps what must be kept and fits by the count that refused."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.gateway.counting import compile_template
from kvcatch.gateway.truncate import DROP_TURNS, MARKER, MIDDLE_OUT, REJECT, middle_out, shorten, turns

# The turn formats of four model families, as their model cards describe them.
TEMPLATES = {
    "chatml": (
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        "<|im_start|>assistant\n",
    ),
    "llama3": (
        (
            "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
            "{{ m.content | trim }}<|eot_id|>{% endfor %}"
            "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
        ),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        (
            "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
            "{% set ns.system = m.content %}{% elif m.role == 'user' %}[INST] {{ ns.system }}{% set ns.system = '' %}"
            "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}"
            "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
        ),
        "[/INST]",
    ),
    "gemma": (
        (
            "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
            "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
            "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
        ),
        "<start_of_turn>model\n",
    ),
}
words = st.text(alphabet="abc de\nf", min_size=1, max_size=60)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict]:
    messages: list[dict] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(words)})
    for number in range(draw(st.integers(1, 6))):
        messages.append({"role": "user", "content": draw(words) * draw(st.integers(1, 8))})
        if draw(st.booleans()):
            call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": draw(words), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": draw(words)})
        messages.append({"role": "assistant", "content": draw(words)})
    messages.append({"role": "user", "content": draw(words) * draw(st.integers(1, 20))})
    return messages


def cut(prompt, budget, policy, count):
    async def counted(trial):
        return count(trial)

    return asyncio.run(shorten(prompt, count(prompt), budget, policy, counted))


@pytest.mark.parametrize("family", TEMPLATES)
@given(messages=conversations(), share=st.floats(0.05, 1.1), policy=st.sampled_from([DROP_TURNS, MIDDLE_OUT]))
def test_the_template_the_system_prompt_and_tool_pairs_stay_whole(family, messages, share, policy):
    source, ending = TEMPLATES[family]
    render = compile_template(source, {"bos_token": "<s>"})

    def count(trial):
        return len(render(trial))  # one token is one character

    whole = render(messages)
    budget = int(len(whole) * share)
    found = cut(messages, budget, policy, count)
    if found is None:
        return
    kept, tokens = found
    text = render(kept)
    assert tokens == len(text) <= budget or kept == messages
    system = [message for message in messages if message["role"] == "system"]
    assert [message for message in kept if message["role"] == "system"] == system
    if system and family != "mistral":
        head = render(system)[: -len(ending)]
        assert text.startswith(head)
        assert whole.startswith(head)
    assert text.startswith(whole[:3])
    assert text.endswith(ending)
    # The last turn stays, whole pairs of calls and results, and assistants word for word.
    assert kept[-1]["role"] == "user"
    calls = {call["id"] for message in kept for call in message.get("tool_calls", ())}
    assert {m["tool_call_id"] for m in kept if m["role"] == "tool"} == calls
    assert all(message in messages for message in kept if message["role"] != "user")
    assert cut(kept, budget, policy, count) == (kept, tokens)


@given(messages=conversations(), share=st.floats(0.1, 0.9))
def test_as_few_turns_as_needed_are_dropped(messages, share):
    def count(trial):
        return sum(len(message["content"]) + 5 for message in trial)

    budget = int(count(messages) * share)
    found = cut(messages, budget, DROP_TURNS, count)
    groups = turns(messages)
    sizes = []
    for number in range(len(groups)):
        gone = {index for group in groups[:number] for index in group}
        sizes.append(count([m for i, m in enumerate(messages) if i not in gone]))
    fitting = [size for size in sizes if size <= budget]
    assert (found[1] if found else None) == (max(fitting) if fitting else None)


@given(st.text(min_size=1, max_size=400), st.integers(1, 400))
def test_a_text_keeps_its_two_ends(text, budget):
    found = cut(text, budget, MIDDLE_OUT, len)
    if len(text) <= budget:
        assert found == (text, len(text))
    elif found is not None:
        kept, tokens = found
        assert tokens == len(kept) <= budget
        head, _, tail = kept.partition(MARKER)
        assert text.startswith(head)
        assert text.endswith(tail)
        # No much longer cut would have fitted: nothing is thrown away without need.
        assert budget - tokens <= max(1, budget // 200) + 2 * 24 + 2
    else:
        assert budget < len(MARKER)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=50), st.integers(1, 60))
def test_token_ids_keep_their_two_ends(ids, budget):
    kept, tokens = cut(ids, budget, MIDDLE_OUT, len)
    assert tokens == len(kept) == min(len(ids), budget)
    assert kept[: (budget + 1) // 2] == ids[: (budget + 1) // 2]
    assert kept[-1] == ids[-1] or budget == 1


def test_reject_never_cuts():
    assert cut("abcdef", 3, REJECT, len) is None


def test_a_cut_falls_between_words():
    assert middle_out("aaa bbb ccc ddd eee fff", 13) == "aaa" + MARKER + "fff"
