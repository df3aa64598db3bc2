"""/v1/chat/completions through the `openai` client."""

import json

import pytest
from openai import BadRequestError, OpenAI

from tests.conftest import SHARED
from tests.server.conftest import NAME, running
from tests.server.engines import ScriptedEngine
from tests.server.http import ask

HI = [{"role": "user", "content": "hi"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
# A template with tools in Hermes' form and reasoning, short enough for a tiny model.
TEMPLATE = """
{%- if tools %}{% for tool in tools %}<tools>{{ tool | tojson }}</tools>{% endfor %}<tool_call>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""


def scripted(answer, **options):
    """A server whose model says `answer(prompt)`."""
    return running(lambda progress: ScriptedEngine(answer, **options), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def client(up):
    with OpenAI(base_url=f"{up.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def connect(up):
    return OpenAI(base_url=f"{up.base}/v1", api_key="none", max_retries=0)


def joined(stream):
    """The message that the deltas of a stream add up to, and the finish reason."""
    content, reasoning, calls, reason = "", "", {}, None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            for call in choice.delta.tool_calls or ():
                known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                known["arguments"] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    return content, reasoning, list(calls.values()), reason


def test_whole_and_streamed_answers_agree(client):
    params = {"model": NAME, "messages": HI, "max_completion_tokens": 20, "seed": 3, "temperature": 0.9}
    whole = client.chat.completions.create(**params)
    stream = list(client.chat.completions.create(**params, stream=True, stream_options={"include_usage": True}))
    assert stream[0].choices[0].delta.role == "assistant"
    content, _, _, reason = joined(stream)
    assert content == whole.choices[0].message.content
    assert reason == whole.choices[0].finish_reason
    assert stream[-1].usage == whole.usage
    assert whole.usage.completion_tokens <= 20
    other = client.chat.completions.create(**params | {"max_completion_tokens": None, "max_tokens": 3})
    assert other.usage.completion_tokens == 3


def test_several_answers(client):
    params = {"model": NAME, "messages": HI, "max_tokens": 8, "n": 3, "seed": 1, "temperature": 1.5}
    whole = client.chat.completions.create(**params)
    texts = [c.message.content for c in whole.choices]
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**params, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_logprobs(client):
    params = {"model": NAME, "messages": HI, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    entries = client.chat.completions.create(**params).choices[0].logprobs.content
    assert len(entries) == 6
    assert all(len(e.top_logprobs) == 2 and e.logprob <= 0 for e in entries)
    assert all(e.top_logprobs[0].token == e.token for e in entries)  # greedy
    assert all(bytes(e.bytes).decode("utf-8", errors="replace") == e.token for e in entries)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**params, stream=True)
        for choice in chunk.choices
        for entry in choice.logprobs.content
    ]
    assert [e.logprob for e in streamed] == [e.logprob for e in entries]
    plain = client.chat.completions.create(model=NAME, messages=HI, max_tokens=2)
    assert plain.choices[0].logprobs is None


def test_json_schemas_are_followed(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD["function"]["parameters"]}}
    for seed in range(2):
        got = client.chat.completions.create(
            model=NAME, messages=HI, seed=seed, temperature=1.2, response_format=wanted, max_tokens=300
        )
        value = json.loads(got.choices[0].message.content)
        assert set(value) == {"a", "b"}
        assert got.choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_json_schemas_are_followed_over_200_seeds(client):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
            "size": {"type": "number", "minimum": 0, "maximum": 9},
        },
        "required": ["name", "tags", "size"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    for seed in range(200):
        got = client.chat.completions.create(
            model=NAME, messages=HI, seed=seed, temperature=1.0, response_format=wanted, max_tokens=1000
        )
        value = json.loads(got.choices[0].message.content)
        assert set(value) == {"name", "tags", "size"}
        assert len(value["name"]) <= 12
        assert set(value["tags"]) <= {"a", "b", "c"}
        assert 0 <= value["size"] <= 9


@pytest.mark.parametrize(
    "extra",
    [
        {"guided_regex": "ab{2,4}c"},
        {"grammar": 'root ::= "a" "b"{2,4} "c"'},
        {"structured_outputs": {"regex": "ab{2,4}c"}},
        {"guided_choice": ["abbc", "abbbc"]},
    ],
)
def test_other_grammars(client, extra):
    got = client.chat.completions.create(model=NAME, messages=HI, seed=4, max_tokens=50, extra_body=extra)
    assert got.choices[0].message.content in ("abbc", "abbbc", "abbbbc")


def test_forced_tool_calls_follow_their_schema():
    plain = TEMPLATE.replace("think>", "aside>")  # a random model would never stop thinking
    with running(chat_template=plain) as up, connect(up) as client:
        params = {
            "model": NAME, "messages": HI, "tools": [ADD], "tool_choice": "required",
            "parallel_tool_calls": False, "seed": 1, "max_tokens": 300,
        }  # fmt: skip
        got = client.chat.completions.create(**params)
        (call,) = got.choices[0].message.tool_calls
        assert call.function.name == "add"
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"a", "b"}
        assert got.choices[0].finish_reason == "tool_calls"
        assert got.choices[0].message.content is None
        named = {"type": "function", "function": {"name": "add"}}
        stream = client.chat.completions.create(**params | {"tool_choice": named}, stream=True)
        _, _, (streamed,), reason = joined(stream)
        assert json.loads(streamed["arguments"]) == arguments
        assert reason == "tool_calls"


def test_a_loop_of_tool_calls():
    """The model calls a tool twice at once, gets both results, and answers."""

    def answer(prompt):
        if "<|im_start|>tool\n5" in prompt and "<|im_start|>tool\n11" in prompt:
            return "<think>easy</think>The sums are 5 and 11."
        assert '"name": "add"' in prompt
        calls = [{"name": "add", "arguments": {"a": a, "b": b}} for a, b in ((2, 3), (5, 6))]
        return "Let me see. " + "".join(f"<tool_call>{json.dumps(c)}</tool_call>" for c in calls)

    with scripted(answer) as up, connect(up) as client:
        for stream in (False, True):
            messages = [{"role": "user", "content": "2+3 and 5+6?"}]
            for _ in range(5):
                got = client.chat.completions.create(model=NAME, messages=messages, tools=[ADD], stream=stream)
                if stream:
                    content, reasoning, calls, reason = joined(got)
                else:
                    message, reason = got.choices[0].message, got.choices[0].finish_reason
                    content, reasoning = message.content, (message.model_extra or {}).get("reasoning_content", "")
                    calls = [{"id": c.id, **c.function.model_dump()} for c in message.tool_calls or ()]
                if reason != "tool_calls":
                    break
                assert content == "Let me see."
                function = [{"name": c["name"], "arguments": c["arguments"]} for c in calls]
                sent = [
                    {"id": c["id"], "type": "function", "function": f} for c, f in zip(calls, function, strict=True)
                ]
                messages.append({"role": "assistant", "content": content, "tool_calls": sent})
                for call in calls:
                    arguments = json.loads(call["arguments"])
                    result = str(arguments["a"] + arguments["b"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            assert content == "The sums are 5 and 11."
            assert reasoning == "easy"
            assert len(messages) == 4


def test_reasoning_is_split_off_and_counted():
    with scripted(lambda prompt: "so it is</think>\n\nYes.") as up, connect(up) as client:
        params = {
            "model": NAME, "messages": HI, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
        }  # fmt: skip
        got = client.chat.completions.create(**params)
        message = got.choices[0].message
        assert message.content == "Yes."
        assert message.model_extra["reasoning_content"] == "so it is"
        details = got.usage.completion_tokens_details
        assert 0 < details.reasoning_tokens < got.usage.completion_tokens
        assert joined(client.chat.completions.create(**params, stream=True))[:2] == ("Yes.", "so it is")


def test_an_answer_can_be_begun_by_the_client():
    prompts = []

    def answer(prompt):
        prompts.append(prompt)
        return " world"

    with scripted(answer) as up, connect(up) as client:
        got = client.chat.completions.create(
            model=NAME,
            messages=[*HI, {"role": "assistant", "content": "hello"}],
            extra_body={"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": True}},
        )
        assert got.choices[0].message.content == " world"
        assert prompts[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nhello")


def test_no_tools_when_none_are_wanted():
    with scripted(lambda prompt: '<tool_call>{"name": "add", "arguments": {}}</tool_call>') as up:
        with connect(up) as client:
            got = client.chat.completions.create(model=NAME, messages=HI, tools=[ADD], tool_choice="none")
            assert got.choices[0].message.tool_calls is None
            assert got.choices[0].message.content.startswith("<tool_call>")
        assert "<tools>" not in up.server.loop._engine.prompts[0]


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B"])
def test_real_templates_take_a_whole_conversation(name):
    path = SHARED / "templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip("the shared golden folder is absent")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "user", "content": "thanks"},
    ]
    text = path.read_text(encoding="utf-8")
    with running(lambda progress: ScriptedEngine(lambda prompt: "3."), chat_template=text) as up:
        with connect(up) as client:
            got = client.chat.completions.create(model=NAME, messages=messages, tools=[ADD])
            assert got.choices[0].finish_reason == "stop"
        (prompt,) = up.server.loop._engine.prompts
    for part in ("be brief", "1+2?", "add", "3", "thanks"):
        assert part in prompt


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [ADD]}, "tools"),  # the tiny model's template knows none
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "messages"),
        ({"n": 200}, "n"),
    ],
)
def test_what_cannot_be_is_refused(client, values, param):
    with pytest.raises(BadRequestError) as error:
        client.post("/chat/completions", body={"model": NAME, "messages": HI, **values}, cast_to=object)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, "JSON schema"),
        ({"guided_json": "{"}, "holds no JSON"),
        ({"guided_regex": "a(b"}, "regular expression"),
        ({"grammar": "root ::= missing"}, "GBNF"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_and_says_where(client, values, message):
    with pytest.raises(BadRequestError, match=message):
        client.post("/chat/completions", body={"model": NAME, "messages": HI, **values}, cast_to=object)


def test_two_tools_of_one_name_are_refused():
    with scripted(lambda prompt: "x") as up:
        status, _, content = ask(up, "/v1/chat/completions", {"messages": HI, "tools": [ADD, ADD]})
    assert status == 400
    assert b"another tool has already" in content
