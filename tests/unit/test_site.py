"""The site of the pages: it builds strictly, is whole, and asks nothing of any other place."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from browser import Shown, chromium
from doc_pages import PAGES, REPO

pytestmark = [pytest.mark.needs("docs"), pytest.mark.stage("docs")]

# What a browser fetches by itself; an <a> is followed by a reader.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: what is not told is no reason for --strict to fail.
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=REPO, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


class Fetches(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.places, self.classes = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.classes |= set((given.get("class") or "").split())
        if place := given.get(FETCHED.get(tag, "")):
            self.places.append(place)


def built(site):
    return {path: Fetches(path.read_text("utf-8")) for path in site.rglob("*.html")}


def test_every_page_is_there(site):
    pages = {page.removeprefix("docs/").replace(".md", ".html") for page in PAGES if page.startswith("docs/")}
    assert pages <= {str(path.relative_to(site)) for path in site.rglob("*.html")}


def test_a_page_fetches_files_of_the_site_alone(site):
    pages = built(site)
    assert len(pages) > 30
    for path, page in pages.items():
        assert page.places
        # A page is left out that tells what was not found: it is read from any place, by absolute paths.
        for place in page.places if path.name != "404.html" else ():
            assert not re.match(r"[a-z]+:|//", place), f"{path.name} fetches {place}"
            assert (path.parent / place.partition("?")[0].partition("#")[0]).exists(), f"{path.name}: {place}"
        # The theme fetches its renderer from elsewhere where a page has such a block.
        assert "mermaid" not in page.classes, path.name


def test_a_style_fetches_nothing_from_elsewhere(site):
    styles = [path.read_text("utf-8") for path in site.rglob("*.css")]
    assert styles
    assert not [found for text in styles for found in re.findall(r"""url\(["']?(?:https?:)?//[^)]*""", text)]


def test_the_search_works_from_a_folder(site):
    script = (site / "search/search_index.js").read_text("utf-8")
    index = json.loads(script.removeprefix("var __index = "))
    found = {entry["location"] for entry in index["docs"] if "Slurm" in entry["title"]}
    assert any(place.startswith("clusters.html") for place in found)
    assert "javascripts/iframe-worker.js" in Fetches((site / "index.html").read_text("utf-8")).places


@pytest.mark.needs("browser")
def test_the_search_finds_the_page_of_a_subject(site):
    subjects = {"reward function": "rewards", "multi-node": "clusters", "torchrun": "clusters"}
    subjects |= {"LoRA": "weights", "wandb": "metrics"}
    with chromium() as browser:
        shown = Shown(browser, site / "index.html", 1280)
        for words, page in subjects.items():
            shown.page.goto((site / "index.html").as_uri())
            shown.page.get_by_role("textbox", name="Search").fill(words)
            results = shown.page.locator("a.md-search-result__link")
            results.first.wait_for(timeout=60_000)
            first = results.first.get_attribute("href")
            assert first.partition("#")[0].partition("?")[0].endswith(f"/{page}.html"), words


def test_a_diagram_shows_what_its_source_says():
    sources = sorted((REPO / "docs/images").glob("*.mmd"))
    assert len(sources) >= 5
    for source in sources:
        drawn = re.sub(
            r"<style>.*?</style>", "", source.with_suffix(".svg").read_text("utf-8"), flags=re.DOTALL
        )
        shown = "".join(re.findall(r">([^<]+)<", drawn))
        for label in labels(source.read_text("utf-8")):
            assert re.sub(r"\s", "", label) in re.sub(r"\s", "", shown), f"{source.name}: {label}"


def labels(source):
    """The texts of a flow chart's boxes and arrows, or of a state diagram's states and arrows."""
    if source.startswith("flowchart"):
        return [text for found in re.findall(r"\[\(?([^\])]+)|\|([^|]+)\|", source) for text in found if text]
    found = re.findall(r"([A-Z]{3,})|: (.+)$", source, re.MULTILINE)
    return [text for pair in found for text in pair if text]
