"""The assistant's backend, in front of a model whose answers are written here."""

from __future__ import annotations

import base64
import http.client
import io
import json
import sqlite3
import subprocess
import time
from contextlib import closing

import pytest
from assistant.running import assistant, calls
from fake_openai import Reply, says
from PIL import Image

import examples.assistant.__main__ as start
from examples.assistant.__main__ import parse
from examples.assistant.picture import MAX_BYTES, PictureError, clean

pytestmark = pytest.mark.slow

TOOLS = ["log_meal", "search_food", "day_summary", "delete_entry"]


def rows(run) -> list[tuple]:
    with sqlite3.connect(run.database) as database:
        return database.execute("SELECT food, grams, kcal FROM meals ORDER BY id").fetchall()


def encoded(image: Image.Image, format: str = "JPEG", **more) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **more)
    return file.getvalue()


def base64_photo() -> str:
    return base64.b64encode(encoded(Image.new("RGB", (40, 30), "red"))).decode()


def roles(body: dict) -> list[str]:
    return [message["role"] for message in body["messages"]]


def results(events: list[dict]) -> list[str]:
    return [event["call"]["result"] for event in events if event["type"] == "call"]


# --- turns ------------------------------------------------------------------------------------------------------------


def test_tool_calls_are_run_and_their_results_go_back_to_the_model(tmp_path):
    two = [("log_meal", {"food": "Eggs", "amount": 2}), ("log_meal", {"food": "rice", "amount": 50, "unit": "g"})]
    replies = [calls(*two), calls(("day_summary", {})), says("All ", "logged."), says("Yes.")]
    with assistant(tmp_path, replies) as run:
        events = run.ask("two eggs and 50 g of rice")
        assert rows(run) == [("egg", 100.0, 155.0), ("rice", 50.0, 65.0)]
        assert [event["type"] for event in events] == ["call", "call", "call", "text", "text", "done"]
        summary = json.loads(results(events)[2])
        assert summary["totals"]["kcal"] == 220 and len(summary["entries"]) == 2
        sent = run.fake.bodies[2]
        assert roles(sent) == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
        assert sent["messages"][3]["tool_call_id"] == sent["messages"][2]["tool_calls"][0]["id"]
        assert [tool["function"]["name"] for tool in sent["tools"]] == TOOLS
        assert sent["tool_choice"] == "auto" and sent["model"] == "sees"
    with assistant(tmp_path, replies[3:]) as run:  # a restart
        shown = run.state()
        assert roles(shown) == ["user", "assistant", "assistant", "assistant"]
        assert [call["name"] for call in shown["messages"][1]["calls"]] == ["log_meal", "log_meal"]
        assert shown["messages"][3]["text"] == "All logged."
        run.ask("Thanks")
        assert len(run.fake.bodies[0]["messages"]) == 9
        run.client.post("/api/conversations")
        assert run.state()["messages"] == [] and len(run.state()["day"]["entries"]) == 2


WRONG = [
    ("log_meal", {"food": "banana split", "amount": 1}, "no food is called 'banana split'; similar: banana"),
    ("log_meal", {"food": "egg", "amount": -1}, "over 0"),
    ("log_meal", {"food": "egg", "amount": 1e9}, "at most 5000 g"),
    ("log_meal", '{"food": "egg", "amount": 1e999}', "at most 5000 g"),
    ("log_meal", {"food": "egg", "amount": "two"}, "amount must fit"),
    ("log_meal", {"food": "egg", "amount": 1, "unit": "cup"}, "unit must fit"),
    ("log_meal", {"food": "egg", "amount": 1, "day": "today"}, "no parameter 'day'"),
    ("log_meal", {"food": "egg"}, "needs amount"),
    ("log_meal", [1], "must be an object"),
    ("log_meal", '{"food": "eg', "not complete JSON"),
    ("delete_entry", {"id": 7}, "no entry has the id 7"),
    ("delete_entry", {"id": 10**30}, "error: "),
    ("drop_table", {}, "there is no tool 'drop_table'"),
]


def test_wrong_arguments_come_back_to_the_model_as_an_error(tmp_path):
    replies = [reply for name, arguments, _ in WRONG for reply in (calls((name, arguments)), says("Sorry."))]
    with assistant(tmp_path, replies) as run:
        for name, arguments, said in WRONG:
            (result,) = results(run.ask("egg"))
            assert result.startswith("error: ") and said in result, (name, arguments)
            *_, call, back = run.fake.bodies[-1]["messages"]
            assert back["content"] == result
            json.loads(call["tool_calls"][0]["function"]["arguments"])  # other servers refuse what is not JSON
        assert rows(run) == []


def test_rounds_and_calls_are_limited(tmp_path):
    many = calls(*[("log_meal", {"food": "egg", "amount": 1})] * 12)
    with assistant(tmp_path, [many] * 6) as run:
        events = run.ask("eggs")
        assert [body["tool_choice"] for body in run.fake.bodies] == ["auto"] * 5 + ["none"]
        assert len(rows(run)) == 60 and "at most 10 calls" in results(events)[11] and events[-1]["type"] == "done"


def test_a_stopped_answer_frees_the_model_and_keeps_its_beginning(tmp_path):
    slow = Reply([(0.0, "I will "), *[(0.05, "wait ")] * 400])
    with assistant(tmp_path, [slow, says("Again.")]) as run:
        with run.client.stream("POST", "/api/messages", json={"text": "hi", "model": "large"}) as reply:
            pieces = reply.iter_text()  # the connection closes with it
            next(pieces)
            busy = run.client.post("/api/messages", json={"text": "hi", "model": "large"})
            assert busy.status_code == 409 and "being written" in busy.json()["error"]
        assert run.fake.left.wait(10)  # the request to the model was closed
        while not run.state()["messages"][1:]:
            time.sleep(0.02)
        stopped = run.state()["messages"][1]
        assert stopped["stopped"] and stopped["text"].startswith("I will ")
        assert run.ask("go on")[0] == {"type": "text", "text": "Again."}
        assert roles(run.fake.bodies[1])[-3:] == ["user", "assistant", "user"]


def test_failures_of_a_model_are_sentences(tmp_path):
    replies = [
        Reply(status=400, message="`messages` is too long"), Reply([(0.0, "A")], ends=False),
        Reply([(0.0, b'data: {"error": {"message": "the engine died"}}\n\n')]), says("long", finish_reason="length"),
    ]  # fmt: skip
    with assistant(tmp_path, replies) as run:
        said = [run.ask("hi")[-2]["message"] for _ in replies]
        run.fake.models = Reply(status=500, message="broken")
        down = run.client.post("/api/messages", json={"text": "hi", "model": "large"})
        assert down.status_code == 503 and "500" in down.json()["error"]
        for body, status in (({"text": " "}, 400), ({"text": "x", "model": "other"}, 400), ({"text": "x" * 5000}, 422)):
            reply = run.client.post("/api/messages", json={"model": "large"} | body)
            assert reply.status_code == status and reply.json()["error"]
    assert "(400): `messages` is too long" in said[0] and "broke off" in said[1]
    assert "the engine died" in said[2] and "maximum length" in said[3]


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_picture_goes_to_a_model_that_sees_and_stays_for_the_page(tmp_path):
    with assistant(tmp_path, [says("Red."), says("Still red."), says("x"), says("x")]) as run:
        run.ask("What is this?", picture=base64_photo())
        image, text = run.fake.bodies[0]["messages"][1]["content"]
        assert image["image_url"]["url"].startswith("data:image/jpeg;base64,") and text["text"] == "What is this?"
        id = run.state()["messages"][0]["picture"]
        kept = run.client.get(f"/api/pictures/{id}")
        assert kept.headers["content-type"] == "image/jpeg" and Image.open(io.BytesIO(kept.content)).size == (40, 30)
        for _ in range(3):
            run.ask(picture=base64_photo())
        users = [m["content"] for m in run.fake.bodies[3]["messages"] if m["role"] == "user"]
        assert [isinstance(content, list) for content in users] == [False, False, True, True]  # the newest two
        run.ask("And you?", model="small")
        sent = run.small.bodies[0]["messages"]
        assert all(isinstance(message["content"], str) for message in sent) and "photo" in sent[1]["content"]
        refused = run.client.post("/api/messages", json={"picture": base64_photo(), "model": "small"})
        assert refused.status_code == 400 and refused.json()["error"] == "blind does not read images."


def test_a_picture_is_kept_upright_and_without_metadata():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    exif.get_ifd(0x8825)[1] = "N"  # a position
    photo = encoded(Image.new("RGB", (3000, 1000), "blue"), exif=exif, comment=b"home")
    kept = Image.open(io.BytesIO(clean(photo)))
    assert kept.format == "JPEG" and kept.size == (341, 1024) and not kept.getexif() and "comment" not in kept.info
    assert Image.open(io.BytesIO(clean(encoded(Image.new("RGBA", (9, 9)), "PNG")))).getpixel((4, 4)) == (255, 255, 255)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "upload",
    [
        b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", encoded(Image.new("RGB", (8, 8)), "GIF"),
        encoded(Image.new("RGB", (80, 80), "red"))[:-200], b"\x89PNG\r\n\x1a\n" + b"\0" * 40,
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\x01\x86\xa0\0\x01\x86\xa0\x08\x02\0\0\0", b"x" * (MAX_BYTES + 1),
    ],
    ids="empty svg gif truncated header huge large".split(),
)  # fmt: skip
def test_other_uploads_are_refused(upload):
    with pytest.raises(PictureError, match="photo must"):
        clean(upload)


# --- the guard --------------------------------------------------------------------------------------------------------


REQUESTS = [
    ({"host": "evil.example"}, 421),  # a name that was made to resolve to loopback
    ({"host": "127.0.0.1.evil.example:80"}, 421),
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"content-length": str(10**9)}, 413),
    ({"transfer-encoding": "chunked"}, 411),
    ({"sec-fetch-site": "same-origin"}, 200),
]


def test_only_the_page_itself_may_write(tmp_path):
    body = json.dumps({"text": "hi", "model": "large"}).encode()
    with assistant(tmp_path, [says("Hello.")]) as run:
        for headers, status in REQUESTS:
            with closing(http.client.HTTPConnection(run.url[7:], timeout=30)) as connection:
                connection.putrequest("POST", "/api/messages", skip_host=True)
                sent = {"host": run.url[7:], "content-type": "application/json", "content-length": str(len(body))}
                for name, value in (sent | headers).items():
                    if name != "content-length" or "transfer-encoding" not in headers:
                        connection.putheader(name, value)
                connection.endheaders(body if status == 200 else None)
                reply = connection.getresponse()
                assert reply.status == status, headers
                assert "script-src 'self'" in reply.headers["content-security-policy"]
                assert status == 200 or run.state()["messages"] == []


def test_meals_are_deleted_and_other_days_are_shown(tmp_path):
    with assistant(tmp_path, [calls(("log_meal", {"food": "egg", "amount": 1})), says("ok")]) as run:
        run.ask("an egg")
        (entry,) = run.client.get("/api/day").json()["entries"]
        assert run.client.get("/api/day?day=2020-02-02").json()["entries"] == []
        assert run.client.get("/api/day?day=soon").status_code == 422
        assert run.client.delete(f"/api/meals/{entry['id']}").json()["food"] == "egg" and rows(run) == []
        assert run.client.delete(f"/api/meals/{entry['id']}").status_code == 404
        assert run.client.get("/../app.py").status_code == run.client.get("/__main__.py").status_code == 404


# --- the command line -------------------------------------------------------------------------------------------------


def test_models_of_the_switch_have_labels(capsys):
    args = parse(["--model", "large=http://127.0.0.1:8000", "--model", "small=runs/a=b", "--require-tools", "small"])
    assert dict(args.model) == {"large": "http://127.0.0.1:8000", "small": "runs/a=b"}
    assert parse([]).model == [] and parse(["--images", "after RL"]).images == ["after RL"]
    for wrong, said in ((["--model", "runs/a"], "write LABEL=URL or LABEL=MODEL"), (["--images", "x"], "no model has")):
        with pytest.raises(SystemExit):
            parse(wrong)
        assert said in capsys.readouterr().err


def test_the_demo_trains_its_models_once(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "RUNS", tmp_path)
    ran = []

    def training(command: list[str]) -> subprocess.CompletedProcess:
        ran.append(command[1:3])
        for folder in start.TINY:
            (tmp_path / folder).mkdir()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(start.subprocess, "run", training)
    for _ in range(2):
        assert start.tiny_models() == {"after RL": str(tmp_path / "after"), "before RL": str(tmp_path / "before")}
    assert ran == [["-m", "examples.assistant.train"]]
