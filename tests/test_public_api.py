"""What README shows works as written."""

import re

import makeway
from tests.conftest import ROOT, golden_path


def test_the_readme_example_runs(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    code = code.replace("MODEL.gguf", str(golden_path("qwen4exp-k96-UD-Q4_K_XL.gguf")))
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_every_exported_name_exists():
    for name in makeway.__all__:
        assert hasattr(makeway, name)
