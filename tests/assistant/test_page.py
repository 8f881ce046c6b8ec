"""The page in a real browser: headless Chromium, in front of a model whose answers are written here."""

from __future__ import annotations

import io
import sqlite3
from pathlib import Path

import pytest
from assistant.browser import CHROMIUM, browsing
from assistant.running import assistant, calls
from fake_openai import Reply, says
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH")]
ATTACK = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
DROP = """(() => {
  const data = new DataTransfer();
  data.items.add(new File(["no photo"], "x.png", {type: "image/png"}));
  document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true}));
})()"""
PREVIEWED = "document.querySelector('#preview img').naturalWidth > 0"


def shows(text: str) -> str:
    return f"document.body.innerText.includes({text!r})"


def count(selector: str, number: int) -> str:
    return f"document.querySelectorAll('{selector}').length === {number}"


@pytest.fixture(scope="module")
def page():
    with browsing() as page:
        yield page
        assert page.complaints == []


@pytest.fixture
def photo(tmp_path) -> str:
    """A photo of a phone: large, turned, and with the place where it was taken."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8825)[1] = "N"
    Image.effect_noise((2400, 1200), 40).convert("RGB").save(tmp_path / "photo.jpg", exif=exif)
    return str(tmp_path / "photo.jpg")


def test_a_photo_becomes_a_row_of_the_day(page, photo, tmp_path):
    log = calls(("log_meal", {"food": "egg", "amount": 2}), ("log_meal", {"food": "dragon", "amount": 1}))
    with assistant(tmp_path, [log, says("Two eggs: ", "155 kcal."), says("You are welcome.")]) as run:
        page.show(1280, 800)
        page.open(run.url)
        page.until(shows("No meals yet."))
        page.upload("#file", photo)
        page.until(PREVIEWED)
        page.write("#text", "My lunch")
        page.click("#send")
        page.until(shows("Two eggs: 155 kcal.") + " && " + count("#entries tr", 1))  # by the stream of events
        with sqlite3.connect(run.database) as database:
            assert database.execute("SELECT food, grams FROM meals").fetchall() == [("egg", 100.0)]
            (jpeg,) = database.execute("SELECT jpeg FROM pictures").fetchone()
        kept = Image.open(io.BytesIO(jpeg))
        assert kept.size == (512, 1024) and not kept.getexif()
        assert page.text("#kcal") == "155" and "Logged egg · 100 g" in page.text("#log")
        assert "no food is called 'dragon'" in page.text(".call.failed")

        before = page.evaluate("document.querySelector('#log').textContent")
        page.open(run.url)  # a reload
        page.until(shows("Two eggs: 155 kcal.") + " && document.querySelector('.user img').naturalWidth === 512")
        assert page.evaluate("document.querySelector('#log').textContent") == before
        page.write("#text", "Thanks")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13)
        page.until(shows("You are welcome."))
        page.click("#entries button")
        page.until(shows("No meals yet.") + " && document.querySelector('#kcal').textContent === '0'")
        page.click("#fresh")
        page.until(shows("What did you eat?") + " && " + count(".message", 0))


def test_a_phone_shows_the_conversation_or_the_day(page, photo, tmp_path):
    with assistant(tmp_path, [calls(("log_meal", {"food": "apple", "amount": 1})), says("An apple. " * 30)]) as run:
        page.show(390, 844, dark=True)
        page.open(run.url)
        page.until(shows("What did you eat?"))
        page.click("#plate")  # a drawn plate in place of a photo
        page.until(PREVIEWED)
        assert page.evaluate("document.querySelector('#preview img').naturalWidth") == 512
        page.click("#preview button")
        page.write("#text", "an apple")
        page.click("#send")
        page.until(shows("An apple. An apple.") + " && " + shows("Today: 94 kcal"))
        fits = "document.documentElement.scrollWidth <= 390 && innerWidth === 390"
        assert page.evaluate(fits) and page.evaluate("document.querySelector('#day').offsetParent === null")
        page.click("#toggle")
        page.until("document.querySelector('#day').offsetParent !== null && document.querySelector('#entries tr')")
        assert page.evaluate(fits)
        page.click("#toggle")
        page.click("#models label:nth-child(2)")  # the small model, which reads no images
        page.until("document.querySelector('#file').disabled && " + shows("blind does not read images."))
        page.write("#text", "Who are you?")
        page.click("#send")
        page.until("[...document.querySelectorAll('.by')].map((each) => each.innerText).join() === 'large,small'")
        assert run.small.bodies[-1]["messages"][-1]["content"] == "Who are you?"
        page.open(run.url)  # the choice is kept
        page.until("document.querySelector('#file').disabled")
        page.click("#models label:nth-child(1)")
        page.until("!document.querySelector('#file').disabled")


def test_names_of_foods_and_texts_of_models_are_shown_as_text(page, tmp_path):
    foods = tmp_path / "foods.csv"
    foods.write_text(f"name,kcal,protein_g,carbohydrate_g,fat_g,portion_g\n{ATTACK},100,1,1,1,100\n")
    replies = [calls(("log_meal", {"food": ATTACK, "amount": 1}), ("log_meal", {"food": ATTACK + "!", "amount": 1}))]
    with assistant(tmp_path, [*replies, says(ATTACK)], foods) as run:
        page.show(1280, 800)
        page.open(run.url)
        page.write("#text", ATTACK)
        page.click("#send")
        page.until(count("#entries tr", 1) + " && document.querySelector('.said')?.textContent === " + repr(ATTACK))
        for _ in range(2):
            assert page.evaluate("document.querySelector('#entries td').firstChild.data") == ATTACK
            assert page.evaluate("document.querySelector('.user p').textContent") == ATTACK
            assert page.evaluate("document.querySelectorAll('main img[src=x], main script').length") == 0
            assert page.evaluate("window.hacked") is None
            page.open(run.url)
            page.until(count("#entries tr", 1) + " && " + count(".message", 2))


def test_an_answer_is_stopped_and_failures_are_sentences(page, photo, tmp_path):
    slow = Reply([(0.0, "Slowly "), *[(0.1, "more ")] * 300])
    with assistant(tmp_path, [slow, Reply(status=400, message="too long")]) as run:
        page.open(run.url)
        page.until(shows("What did you eat?"))
        page.click(".idea")
        page.until(shows("Slowly"))
        page.click("#stop")
        page.until(shows("stopped") + " && !document.querySelector('#send').hidden")
        assert run.fake.left.wait(10)
        page.write("#text", "Again")
        page.click("#send")
        page.until(shows("refused the request (400): too long"))
        page.evaluate(DROP)
        page.until(shows("This browser cannot read the photo."))
    page.write("#text", "Anyone?")
    page.click("#send")
    page.until(shows("The assistant does not answer."))
    assert page.evaluate("document.querySelector('#text').value") == "Anyone?"
    page.complaints.clear()


def test_every_file_of_the_page_is_local():
    for file in (Path(__file__).parents[2] / "examples/assistant/page").iterdir():
        text = file.read_text()
        assert "innerHTML" not in text and "https://" not in text, file
