"""What is written for a person, when there is none."""

import io
import signal
import subprocess
import sys

import pytest

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.driver.output import open_console, visible, write_line

# Sets the title, clears the screen, writes to the clipboard, colours, turns the direction; C1, DEL, a lone surrogate.
FOREIGN = (
    "\x1b]0;title\x07\x1b[2J\x1b]52;c;cm0gLXJm\x07\x1b[31m\x9b31m\x90q\x7f"
    "\u202eright\u2066\u200b\ufeff\u2028\rover\ud800"
)
INTERRUPTED = """
import os, signal, sys
from nemo_rl_mcore.driver.signals import exit_status
from nemo_rl_mcore.driver.output import write_line
def run():
    sys.stdin.read()
    write_line(sys.stdout, "nobody reads it")
    signal.raise_signal(signal.SIGINT)
sys.exit(exit_status(run))
"""


def obeyed(text):
    """What of a text a terminal would obey or hide."""
    return {one for one in text if not one.isprintable()} - {"\n", "\t"}


def test_what_a_terminal_obeys_is_spelt_out():
    assert visible("\x1b[2J\x9b\u202e\U000e0041\r") == r"\x1b[2J\x9b\u202e\U000e0041\r"
    assert not obeyed(visible(FOREIGN))
    for text in ("", "two\nlines\tof text", "né, 日本　語, é, 😀, \u00a0\ue000"):
        assert visible(text) == text
    every = "".join(map(chr, range(0x110000)))
    assert visible(visible(every)) == visible(every)


def test_a_line_shows_what_it_holds(capfd):
    write_line(sys.stdout, f"a {FOREIGN} b\nc")
    out = capfd.readouterr().out
    assert not obeyed(out)
    assert out.startswith(r"a \x1b]0;title\x07")
    assert out.endswith(" b\nc\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_has_its_own_colours_and_no_others(terminal):
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    colours = "standard" if terminal else None
    console = open_console(
        io.StringIO(), force_terminal=terminal, color_system=colours, width=300, highlight=False
    )
    table = Table(title=FOREIGN[:-1], border_style="red")
    table.add_column(FOREIGN)
    table.add_row(FOREIGN)
    for shown in (FOREIGN, Text(FOREIGN), table, Panel(Text(FOREIGN, style="green"), title=FOREIGN[:-1])):
        console.print(shown)
    console.print(FOREIGN, markup=False, highlight=False, soft_wrap=True)
    out = console.file.getvalue()
    own = {"\x1b[31m", "\x1b[32m", "\x1b[0m", "\x1b[1m", "\x1b[3m"} if terminal else set()
    for code in own:
        out = out.replace(code, "")
    assert not obeyed(out)
    assert ("\x1b[31m" in console.file.getvalue()) == terminal


def test_a_key_of_a_recipe_is_shown(tmp_path, request, capfd):
    exemplar = request.config.rootpath / "examples/configs/grpo_copy_cpu.yaml"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'defaults: {exemplar}\n"\\e[2Jkey\\e]0;t\\a\\u202e": 1\n')
    assert main(["check", "--config", str(recipe)]) == 2
    told = capfd.readouterr().err
    assert r"\x1b[2Jkey" in told
    assert not obeyed(told)


@pytest.mark.stage("processes")
def test_an_exception_that_nothing_caught_is_shown():
    script = (
        "import sys\nfrom nemo_rl_mcore import cli\nfrom nemo_rl_mcore.cli import commands\n"
        "def fail(arguments): raise ValueError('\\x1b[2J\\x9b')\n"
        "commands.run_command = fail\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    assert rb"ValueError: \x1b[2J\x9b" in done.stderr
    assert not obeyed(done.stderr.decode())


@pytest.mark.stage("processes")
def test_pipes_without_a_reader_change_no_exit_status():
    """As behind `| tee` after Ctrl-C, which ends tee as well; Python itself would end with 120."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.stdin.close()
    assert process.wait(timeout=60) == 128 + signal.SIGINT
