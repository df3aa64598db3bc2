import json

from tests.cli.test_cli import run


def test_the_story_is_measured_and_true(capsys):
    code, out, err = run(capsys, "demo", "-n", "6", "--json")
    assert code == 0, err
    arms = json.loads(out)["arms"]
    on, off = arms["hand-over"], arms["no hand-over"]
    assert on["plan"]["slots"] == off["plan"]["slots"]
    assert on["n_answer_tokens"] == off["n_answer_tokens"] == 12
    reading = [arm["phases"]["prefill"]["link_bytes"] for arm in (on, off)]
    assert 0 < 2 * reading[0] < reading[1], "shorter sweeps cross the link again and again"
    for arm in (on, off):
        moved = sum(phase["link_bytes"] for phase in arm["phases"].values())
        assert moved + arm["link"]["loaded_bytes"] == arm["link"]["bytes"]


def test_people_see_the_plan_the_text_and_the_table(capsys):
    code, out, err = run(capsys, "demo", "-n", "2", "--vram", "20MiB")
    assert code == 0, err
    for words in ("slots for", "KV cache", "over the link, reading prompts", "bit for bit"):
        assert words in out


def test_a_card_too_small_is_refused(capsys):
    code, out, err = run(capsys, "demo", "--vram", "4MiB", "--json")
    assert code == 2
    assert "--vram" in err
    assert out == ""
