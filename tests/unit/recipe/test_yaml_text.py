"""The parser in C reads what OmegaConf's own loader reads."""

from functools import partial
from io import StringIO

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_rl_mcore.recipe.sources import origins
from nemo_rl_mcore.recipe.yaml_text import RecipeLoader

TEXTS = (
    "a: 1e-5\nb: 1_000\nc: .inf\nd: -0.0\ne: 0x10\nf: 0o7\ng: 12:30:45\n",
    "a: 2020-01-01\nb: yes\nc: 'yes'\nd: ~\ne: null\nf:\n",
    "a: &rows {b: [1, {c: d}]}\ne: *rows\nf: {<<: *rows, g: 2}\n",
    'a: |\n  two\n  lines\nb: >-\n  one\n  line\nc: "\\u00e9\\n"\n',
    "\ufeffa: '${b}'\nb: ${oc.env:HOME}\n",
    "1: a\ntrue: b\n2.5: c\n",
    "%YAML 1.1\n---\na: 1\n...\n",
)
WRONG = (
    "a: 1\nb: 2\na: 3\n",
    "a: {b: 1, b: 2}\n",
    "a: [1\n",
    "a: !!python/object/apply:os.getcwd []\n",
    "a: *b\n",
    "--- 1\n--- 2\n",
)


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_what_omegaconf_reads(text):
    found = yaml.load(text, Loader=RecipeLoader)
    assert repr(found) == repr(OmegaConf.to_container(OmegaConf.load(StringIO(text))))


@pytest.mark.parametrize("text", WRONG)
def test_what_omegaconf_refuses_is_refused(text):
    for read in (partial(yaml.load, Loader=RecipeLoader), lambda one: OmegaConf.load(StringIO(one))):
        with pytest.raises(yaml.YAMLError):
            read(text)


@pytest.mark.parametrize("later", ["a: null", "a: [3]", "a: 3"])
@pytest.mark.parametrize("earlier", ["a: {b: {c: 1}}", "a: [{b: 1}, 2]"])
def test_what_a_later_file_replaces_has_no_origin(tmp_path, earlier, later):
    files = tmp_path / "earlier.yaml", tmp_path / "later.yaml"
    for file, text in zip(files, (earlier, later), strict=True):
        file.write_text(f"{text}\nab: 1\n")
    assert {key: origin.file for key, origin in origins(files).items()} == dict.fromkeys(
        ["a", "ab", *(["a.0"] if later == "a: [3]" else [])], 1
    )
