"""Chat templates: prompts are those of transformers, and templates that are broken or dangerous
are refused in one line.
"""

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest

from posenc_export.runtime.artefact import chat_template
from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.tokenizer import ByteCodec, TokenizerCodec

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
from tests.runtime.artefact.test_tokenizer import byte_level  # noqa: E402

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Ways to write templates that published models use.
TEMPLATES = {
    "each message between marks, with a system message by default": """
        {%- for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}
        {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}
        {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "turns of users that alternate, with the system message in the first": """
        {%- if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system = messages[0].content | trim %}
        {%- else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}
        {%- for message in loop_messages %}
        {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}
        {%- if message.role == 'user' %}{{ bos_token + '[INST] ' }}\
{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and system else '' }}
        {{- message.content.strip() + ' [/INST]' }}{% else %}\
{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "a namespace, loops with break and continue, and a part for training": """
        {%- set seen = namespace(system='', count=0) %}
        {%- for message in messages %}{% if message.role == 'system' %}\
{% set seen.system = message.content %}{% continue %}{% endif %}
            {% set seen.count = seen.count + 1 %}
            {% if seen.count > 3 %}{% break %}{% endif %}
            {% generation %}
            {% set inner = message.content | upper %}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ inner }}<end_of_turn>
            {% endgeneration %}
        {% endfor %}
        {{ inner is defined }} {{ seen.system | default('none', true) }} {{ seen.count }}""",
    "dates, JSON, tests for tools and documents, and macros": """
        {%- macro one(message) %}{{ message | tojson }}{{ message | tojson(indent=2) }}\
{% endmacro %}
        {%- if tools is not none and tools %}tools{% endif %}\
{% if documents is defined %}documents {{ documents }}{% endif %}
        {%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}\
{% endif %}{{ date_string }}
        {%- for message in messages[::-1] %}{{ one(message) }}{% endfor %}{{ cls_token }}\
{{ pad_token }}{{ range(3) | list }}
        {%- for key, value in dict(a=1, b='<é>').items() %}{{ key }}={{ value | tojson }}\
{% endfor %}""",
}
TURNS = [
    [{"role": "user", "content": '  Hi <b> & "you" \n'}],
    [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "Zoë 🎉?"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": ""},
    ],
    [
        {"role": "system", "content": "s"},
        *[
            {"role": role, "content": role}
            for role in ("user", "assistant", "user", "assistant", "user")
        ],
    ],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
]


def _words() -> Any:
    """A tokenizer of single bytes, with special tokens."""
    from tokenizers import AddedToken

    tokenizer = byte_level()
    texts = (*SPECIAL.values(), "<|im_start|>", "<|im_end|>", "<start_of_turn>")
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
    return tokenizer


def _codec(folder: Path) -> TokenizerCodec:
    (folder / "tokenizer.json").write_text(_words().to_str())
    return TokenizerCodec(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=_words(), **SPECIAL)
    codec = ChatCodec(_codec(tmp_path), TEMPLATES[name], SPECIAL)
    for messages, reply in itertools.product(TURNS, (True, False)):
        try:
            expected = theirs.apply_chat_template(
                messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=reply
            )
        except Exception as error:
            assert "alternate" in str(error)
            with pytest.raises(ValueError, match="chat: expected .*Roles must alternate"):
                codec.text(messages, reply)
            continue
        assert codec.text(messages, reply) == expected
        if reply:
            how = {"chat_template": TEMPLATES[name], "add_generation_prompt": True}
            ids = theirs.apply_chat_template(messages, return_dict=False, **how)
            assert codec.encode(messages) == ids


def test_a_reply_ends_at_the_token_that_the_template_writes_after_one(tmp_path: Path) -> None:
    codec, names = _codec(tmp_path), list(TEMPLATES)
    for name, token in zip(names, ("<|im_end|>", "</s>"), strict=False):
        ends = ChatCodec(codec, TEMPLATES[name], SPECIAL).ends
        assert [codec.bytes_of(end) for end in ends] == [token.encode()]
    assert ChatCodec(codec, TEMPLATES[names[3]], SPECIAL, (7,)).ends == (7,)


BROKEN: dict[str, str] = {
    "a template that does not end": "{% for message in messages %}",
    "an unknown block": "{% secret %}",
    "classes of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a function's globals": "{{ raise_exception.__globals__['os'].system('true') }}",
    "an attribute by a filter": "{{ (messages | attr('__class__')).mro() }}",
    "a format string that reads attributes": (
        "{{ '{0.__class__}'.format(messages) | upper }}{{ "
        "('{0.__class__.__init__.__globals__}').format(messages).x.y }}"
    ),
    "a change of the messages": "{{ messages.append('more') }}",
    "a name with an underscore in a namespace": "{% set all = namespace(_a=1) %}{{ all._a }}",
    "an underscore that is set later": "{% set all = namespace() %}{% set all.__class__ = 1 %}",
    "a file": "{% include '/etc/hostname' %}",
    "a range without end": "{{ range(10 ** 9) | list }}",
    "a division by zero": "{{ 1 / 0 }}",
    "a macro without end": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "a name that nobody defines": "{{ unknown.part.other }}",
    "a sum of different types": "{{ messages[0].content + 1 }}",
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_template_that_is_broken_or_dangerous_is_refused_in_one_line(case: str) -> None:
    said = r"\Achat: expected [^\n]*, got an error \([^\n]+\); [^\n]+\Z"
    with pytest.raises(ValueError, match=said):
        ChatCodec(ByteCodec(), BROKEN[case], {}).text([{"role": "user", "content": "Hi"}])


def test_a_jinja2_whose_sandbox_can_be_left_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "3.1.5")
    said = r"chat: expected jinja2 of at least 3\.1\.6, .* got 3.1.5"
    with pytest.raises(ValueError, match=said):
        ChatCodec(ByteCodec(), "", {})


def test_the_prompt_has_no_special_tokens_but_those_of_the_template(tmp_path: Path) -> None:
    from tokenizers import processors

    made = _words()
    special = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", None, special)
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    codec = TokenizerCodec(tmp_path)
    chat = ChatCodec(codec, "{{ bos_token }}{{ messages[0].content }}", SPECIAL)
    result: list[int] = chat.encode([{"role": "user", "content": "a"}])
    assert result == codec.encode("a")[:-1]


NEST = "{% set all = namespace(a=[1, 2]) %}{% for i in range(40) %}{% set all.a = [all.a, all.a] %}"
TWINS = "{% set all = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set all.a = [all.a, all.a] %}{% set all.b = [all.b, all.b] %}{% endfor %}"  # noqa: E501
DOUBLE = "{% set all = namespace(a='ab') %}{% for i in range(40) %}{% set all.a = "
LOOP = "{% for a in range(99999) %}"
ALL = "range(99999) | list"
# Each takes hours or gigabytes.
ENDLESS = [
    f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
    f"{LOOP}{{% for b in range(99999) if b < 0 %}}x{{% endfor %}}{{% endfor %}}",
    f"{LOOP}{{{{ {ALL} }}}}{{% endfor %}}",
    f"{LOOP}{{{{ {ALL} | sum }}}}{{% endfor %}}",
    f"{LOOP}{{% if a in ({ALL}) | map('string') | list %}}{{% endif %}}{{% endfor %}}",
    f"{DOUBLE}all.a + all.a %}}{{% endfor %}}{{{{ all.a }}}}",
    f"{DOUBLE}all.a ~ all.a %}}{{% endfor %}}",
    f"{DOUBLE}all.a * 2 %}}{{% endfor %}}",
    f"{DOUBLE}all.a | replace('a', 'aa') %}}{{% endfor %}}",
    f"{DOUBLE}'%s%s' % (all.a, all.a) %}}{{% endfor %}}",
    f"{DOUBLE}'{{0}}{{0}}'.format(all.a) %}}{{% endfor %}}",
    f"{DOUBLE}[all.a, all.a] | join %}}{{% endfor %}}",
    f"{DOUBLE}all.a | tojson | tojson %}}{{% endfor %}}",
    f"{DOUBLE}all.a.replace('', all.a) %}}{{% endfor %}}",
    f"{NEST}{{% endfor %}}{{{{ all.a }}}}",
    f"{NEST}{{% endfor %}}{{{{ all.a | tojson }}}}",
    f"{TWINS}{{{{ all.a == all.b }}}}",
    f"{TWINS}{{{{ all.a in [all.b] }}}}",
    f"{TWINS}{{{{ [all.a, all.b] | unique | list | length }}}}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '%1000000000s' | format('a') }}",
    "{{ 'x' * 10**9 }}",
    "{{ ('x' * 10**9) | length }}",
    "{{ ([1] * 10**9) | length }}",
    "{{ messages * 10**9 }}",
    "{{ 'x' | center(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ 'a\nb' | indent(10**9) }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ 'a' | tojson(indent=10**9) }}{{ [1, [2]] | tojson(indent=10**9) }}",
    "{{ 2 ** 2 ** 40 > 2 ** (2 ** 40) }}",
    "{% set all = namespace(a=3) %}{% for i in range(99) %}{% set all.a = all.a * all.a %}{% endfor %}",  # noqa: E501
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% set a %}{{ 'x' * 10**7 }}{% endset %}{% for i in range(99) %}{{ a }}{% endfor %}",
    "{% for a in [[1], [2]] recursive %}{% for i in range(9) %}{{ loop(range(9)) }}{% endfor %}{{ loop([a, a]) }}{{ loop([a, a]) }}{% endfor %}",  # noqa: E501
    f"{{{{ ({ALL}) | map('center', 99999) | join }}}}",
    f"{{{{ ({ALL}) | map('string') | map('replace', '', 'x' * 9999) | list | length }}}}",
    f"{{{{ dict(a={ALL}) | tojson }}}}" * 99,
    "{{ 'x y ' * 10**6 | wordwrap(1) }}{{ ('x y ' * 10**7) | wordwrap(1) }}",
    "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "{{ ('a' * 10**7) | urlize }}{{ ('a.' * 10**7) | title }}{{ ('a ' * 10**8) | wordcount }}",
    "{{ ('<' * 10**8) | escape }}",
    "{{ raise_exception('x' * 10**8) }}",
]


@pytest.mark.parametrize("template", ENDLESS, ids=[text[-50:] for text in ENDLESS])
def test_a_template_without_end_is_refused_within_a_second(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.05)
    begun = time.process_time(), sum(os.times()[2:4])
    with pytest.raises(ValueError, match=r"\Achat: expected [^\n]+\Z"):
        ChatCodec(ByteCodec(), template, {}).text([{"role": "user", "content": "Hi"}])
    assert time.process_time() + sum(os.times()[2:4]) - sum(begun) < 1
