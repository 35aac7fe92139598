"""Search in a local corpus: ranks, ties, the stored index, what is refused; and the questions of HotpotQA."""

import json
import random
import re
import subprocess
import sys

import pytest
from folders import GOLDEN

from maporl import HotpotQA, TaskError
from maporl.datasets.search import NOTHING, Index, Passage, QuestionSearch, bm25, read_corpus
from maporl.datasets.search_words import indexed_words, wanted_words
from maporl.errors import ConfigError, install_command
from maporl.grading.spans import exact_match, token_f1
from maporl.rewards.labels import f1
from maporl.types import Dialogue, Example, Utterance

pytest.importorskip("bm25s", reason="needs the extra search")
EXCERPT = GOLDEN / "data/hotpotqa/distractor_dev.jsonl"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bm25"


def written(tmp_path, *rows):
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


class TestTheIndex:
    def test_scores_are_those_of_bm25(self):
        """Three passages of 2, 2 and 4 words: idf and saturation of Lucene's BM25 by hand."""
        from math import log

        index = Index([Passage("", "red apple"), Passage("", "green pear"), Passage("", "red red plum tree")])
        idf = log(1 + (3 - 2 + 0.5) / (2 + 0.5))
        long = idf * 2 / (2 + 1.5 * (0.25 + 0.75 * 4 / (8 / 3)))
        short = idf * 1 / (1 + 1.5 * (0.25 + 0.75 * 2 / (8 / 3)))
        assert index.search("red", 3) == [(3, pytest.approx(long)), (1, pytest.approx(short))]
        assert index.search("RED!", 1) == [(3, pytest.approx(long))]

    def test_equal_scores_come_in_the_order_of_the_corpus(self):
        index = Index([Passage("", f"apple tree {'pear' if n % 2 else 'plum'}") for n in range(40)])
        assert [number for number, _ in index.search("pear", 4)] == [2, 4, 6, 8]
        assert [number for number, _ in index.search("pear apple", 25)] == [*range(2, 41, 2), 1, 3, 5, 7, 9]

    @pytest.mark.parametrize("query", ["", "   ", "unheard zyx", "the of and", "!?", "\x00", "\u3042"])
    def test_a_query_without_known_words_finds_nothing(self, query):
        assert Index([Passage("", "apple"), Passage("", "the pear")]).search(query, 5) == []

    def test_more_passages_are_asked_for_than_there_are(self):
        assert [n for n, _ in Index([Passage("", "apple"), Passage("", "pear")]).search("pear apple", 50)] == [1, 2]

    def test_the_title_counts_too(self):
        assert [n for n, _ in Index([Passage("", "pear"), Passage("Emma", "a novel")]).search("emma", 2)] == [2]

    def test_k1_and_b_change_the_order(self):
        passages = [Passage("", "red apple"), Passage("", "red red plum tree garden house street")]
        assert [n for n, _ in Index(passages, b=0.0).search("red", 2)] == [2, 1]
        assert [n for n, _ in Index(passages, b=1.0).search("red", 2)] == [1, 2]
        assert [n for n, _ in Index(passages, k1=9.0, b=0.3).search("red", 2)] == [2, 1]
        assert [n for n, _ in Index(passages, k1=0.0).search("red", 2)] == [1, 2]

    def test_what_cannot_be_indexed_is_refused(self):
        with pytest.raises(ConfigError, match="holds no passages"):
            Index([])
        with pytest.raises(ConfigError, match="have no words that can be looked for"):
            Index([Passage("", "the of")])
        with pytest.raises(ConfigError, match=r"k1 of at least 0 and b in \[0, 1\], got k1=-1"):
            Index([Passage("", "apple")], k1=-1)


CORPUS = [
    Passage("猫", "猫が好きです。東京に住んでいます。"),
    Passage("", "犬は大阪にいる。カタカナのテーブルとコーヒー。"),
    Passage("北京", "北京是中华人民共和国的首都，人口两千万。"),
    Passage("上海", "上海是中国最大的城市。iPhone手机在这里很流行。"),
    Passage("서울", "서울은 대한민국의 수도이다."),
    Passage("", "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย"),
    Passage("", "Vitamin C is in oranges. The letter is a sign."),
    Passage("", "Vitamin D comes from the sun. R is a language, and so is C#."),
    Passage("", "The liver stores vitamin A."),
    Passage("Café", "Zo\u00eb drinks a cre\u0300me in the Stra\u00dfe of Krak\u00f3w."),
    Passage("", "\uff26\uff55\uff4c\uff4c width 3.5, and \ufb01ne ligatures. Хлеб и соль. हिन्दी भाषा."),
    Passage(
        "İstanbul",
        "الْقَاهِرَة יְרוּשָׁלַיִם Αθήνα ᲗᲑᲘᲚᲘᲡᲘ می\u200cخواهم 葛\U000e0100飾 क\u094d\u200dषमा 1,234,567 years, and 1234 more.",
    ),
    Passage("It (novel)", "It is of 1986."),
]


class TestWordsInAnyScript:
    @pytest.mark.parametrize(("query", "first"), [
        ("猫", 1), ("東京", 1), ("東京に住む人", 1), ("大阪の犬", 2), ("カタカナ", 2), ("コーヒー", 2), ("\uff7a\uff70\uff8b\uff70", 2),
        ("首都", 3), ("中华人民共和国", 3), ("北京人口", 3), ("iphone", 4), ("手机", 4), ("中国城市", 4), ("서울", 5), ("대한민국 수도", 5),
        ("เมืองหลวง", 6), ("vitamin C", 7), ("C vitamin?", 7), ("D", 8), ("r", 8), ("Vitamin A", 9), ("cafe\u0301", 10), ("CAFÉ", 10),
        ("zoe\u0308", 10), ("Zoë's", 10), ("cr\u00e8me", 10), ("strasse", 10), ("KRAKÓW", 10), ("full", 11), ("fine", 11), ("3", 11),
        ("ХЛЕБ", 11), ("हिन्दी", 11), ("sto\u00adres", 9),
        ("istanbul", 12), ("ISTANBUL", 12), ("I\u0307stanbul", 12), ("القاهرة", 12), ("القـاهرة", 12), ("ירושלים", 12),
        ("יְרוּשָׁלַיִם", 12), ("ΑΘΗΝΑ", 12), ("αθήνα", 12), ("თბილისი", 12), ("میخواهم", 12), ("葛飾", 12), ("क्षमा", 12),
        ("1234567", 12), ("1,234,567", 12), ("567", 12), ("1,234", 12), ("It", 13), ("it is", 13),
    ])  # fmt: skip
    def test_the_passage_that_has_it_comes_first(self, query, first):
        assert Index(CORPUS).search(query, 3)[0][0] == first

    @pytest.mark.parametrize("query", ["鳥", "a", "A", "zoe", "名古屋", "क", "the", "234567"])
    def test_what_no_passage_has_is_not_found(self, query):
        assert Index(CORPUS).search(query, 3) == []

    def test_characters_apart_are_found_where_no_pair_is_known(self):
        index = Index([Passage("", "猫と犬"), Passage("", "馬と犬小屋"), Passage("", "馬")])
        assert [number for number, _ in index.search("猫犬", 3)] == [1, 2]
        assert [number for number, _ in index.search("犬小屋", 3)] == [2]

    def test_forms_of_unicode_make_no_difference(self):
        import unicodedata

        rng = random.Random(3)
        letters = "aéèñçöÅstΣßﬁＡ가각猫がぱコーไทยйё 　'’-\u00adA."
        for _ in range(300):
            text = "".join(rng.choice(letters) for _ in range(rng.randrange(12)))
            found = indexed_words(text)
            for form in ("NFC", "NFD", "NFKC", "NFKD"):
                assert indexed_words(unicodedata.normalize(form, text)) == found, (form, text)
            assert wanted_words(text, found) == [] or set(wanted_words(text, found)) <= set(found)

    def test_english_is_read_as_before(self):
        """By bm25s itself, but for single letters, which it leaves out, and for the digits of one number."""
        import bm25s

        for row in map(json.loads, EXCERPT.read_text().splitlines()):
            for text in [row["question"], *(p["text"] for p in row["meta"]["paragraphs"])]:
                text = re.sub(r"(?<=\d),(?=\d)", ", ", text)
                (own,) = bm25s.tokenize([text], return_ids=False, show_progress=False)
                assert [word for word in indexed_words(text) if len(word) > 1] == own


class TestTheTool:
    def test_it_shows_number_title_and_text(self, tmp_path):
        corpus = written(
            tmp_path, {"title": "Emma", "text": "A novel of 1815."}, {"text": "A pear."}, {"text": "A pear."}
        )
        tool = bm25(corpus, k=2)
        assert (
            tool.line() == "search(query: string): Search a collection of texts. Returns the 2 passages that fit best."
        )
        result = tool.run(query="pear novel")
        assert result.text == "[2] A pear.\n\n[1] Emma: A novel of 1815."
        assert [(row["number"], row["title"]) for row in result.value] == [(2, ""), (1, "Emma")]
        assert tool.run(query="").text == NOTHING and tool.run(query="").error is None
        assert bm25(corpus, k=1, name="library").run(query="pear novel").text == "[2] A pear."
        assert bm25(corpus, name="library").name == "library"

    def test_a_file_of_questions_is_a_corpus_of_their_paragraphs(self):
        passages = read_corpus(str(EXCERPT))
        assert len(passages) == 12 and passages[1].title == "The Grey Lamp"
        assert "Mara Ellison" in bm25(str(EXCERPT), k=1).run(query="who wrote the grey lamp").text

    def test_the_index_is_stored_by_its_content(self, tmp_path, cache, monkeypatch):
        corpus = written(tmp_path, {"text": "apple"}, {"text": "pear tree"})
        first = bm25(corpus).run(query="pear")
        assert len(list(cache.glob("*/params.index.json"))) == 1
        built = []
        monkeypatch.setattr(Index, "_built", lambda self, k1, b: built.append(1))
        assert bm25(corpus).run(query="pear") == first and built == []
        written(tmp_path, {"text": "apple"}, {"text": "pear trees"})
        with pytest.raises(AttributeError):  # nothing was built in its place
            bm25(corpus)
        assert built == [1]

    @pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
    def test_a_damaged_index_is_built_again(self, damage, tmp_path, cache, caplog):
        corpus = written(tmp_path, {"text": "apple"}, {"text": "pear tree"})
        first = bm25(corpus).run(query="pear")
        (file,) = cache.glob("*/data.csc.index.npy")
        file.unlink() if damage == "gone" else file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:-3])
        assert bm25(corpus).run(query="pear") == first
        assert "the search index is damaged" in caplog.text
        caplog.clear()
        assert bm25(corpus).run(query="pear") == first and caplog.text == ""

    def test_a_folder_that_cannot_be_written_costs_only_time(self, tmp_path, monkeypatch, caplog):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MAPORL_CACHE", str(tmp_path / "file"))
        assert bm25(written(tmp_path, {"text": "pear"})).run(query="pear").text == "[1] pear"
        assert "cannot be stored" in caplog.text

    def test_two_processes_store_it_at_once(self, tmp_path, cache):
        corpus = written(tmp_path, *({"text": f"word{n} pear"} for n in range(2000)))
        code = f"from maporl.datasets.search import bm25; print(bm25({corpus!r}).run(query='word77').text)"
        running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert [process.communicate()[0] for process in running] == ["[78] word77 pear\n"] * 2
        assert len([place for place in cache.iterdir() if place.is_dir()]) == 1

    @pytest.mark.parametrize(("row", "message"), [
        ("{broken", "line 2: Expecting property name"),
        ('{"title": "x"}', r"line 2: expected a paragraph as .*, got {.title.: .x.}"),
        ('{"text": "  "}', "line 2: expected a paragraph"),
        ('{"paragraphs": 3}', "line 2: expected a list of paragraphs with title and text, got 3"),
        ("[]", "line 2: expected a paragraph"),
    ])  # fmt: skip
    def test_a_corpus_that_cannot_serve_is_named(self, tmp_path, row, message):
        (tmp_path / "corpus.jsonl").write_text('{"text": "apple"}\n' + row)
        with pytest.raises(ConfigError, match=f"corpus.jsonl: {message}"):
            bm25(str(tmp_path / "corpus.jsonl"))

    def test_a_missing_corpus_is_one_error(self, tmp_path):
        written(tmp_path, {"text": "pear"})
        with pytest.raises(ConfigError, match=r"corpsu.jsonl: no such file; did you mean 'corpus.jsonl'\?"):
            bm25(str(tmp_path / "corpsu.jsonl"))
        with pytest.raises(ConfigError, match="no such file; give the path"):
            bm25(str(tmp_path / "nowhere" / "corpus.jsonl"))
        (tmp_path / "empty.jsonl").write_text("\n")
        with pytest.raises(ConfigError, match="it holds no passages"):
            bm25(str(tmp_path / "empty.jsonl"))
        with pytest.raises(ConfigError, match="k: expected the number of passages, at least 1, got 0"):
            bm25(str(tmp_path / "corpus.jsonl"), k=0)

    def test_a_missing_package_is_named_with_what_installs_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "bm25s", None)
        with pytest.raises(ConfigError, match=f"needs the package bm25s .*{re.escape(install_command('search'))}"):
            bm25("nowhere.jsonl")
        with pytest.raises(ConfigError, match="needs the package bm25s"):
            QuestionSearch()


class TestTheEnvironmentOfAQuestion:
    def test_it_searches_the_paragraphs_of_its_question_only(self):
        rows = [json.loads(line) for line in EXCERPT.open()]
        worlds = []
        for row in rows[:2]:
            world = QuestionSearch(k=1)
            assert world.reset(7, {"id": row["id"], **row["meta"]}) is None
            worlds.append(world.tools("ann")[0])
        assert worlds[0].run(query="novel").text.startswith("[2] The Grey Lamp")
        assert worlds[1].run(query="novel").text == NOTHING

    def test_a_fork_finds_the_same(self):
        world = QuestionSearch(k=2)
        world.reset(0, {"paragraphs": ["apple", "pear"]})
        tool, other = world.tools("ann")[0], world.fork().tools("ann")[0]
        assert world.forks == "copy" and tool.run(query="pear") == other.run(query="pear")

    def test_options_reach_the_index(self):
        passages = ["red apple", "red red plum tree garden house street"]
        found = []
        for options in ({"b": 0.0}, {"b": 1.0}, {"k1": 0.0}):
            world = QuestionSearch(k=1, **options)
            world.reset(0, {"paragraphs": passages})
            found.append(world.tools("ann")[0].run(query="red").value[0]["number"])
        assert found == [2, 1, 1]

    def test_a_question_without_paragraphs_is_named(self):
        with pytest.raises(
            ConfigError, match="question 7: expected a list of paragraphs with title and text, got None; or use"
        ):
            QuestionSearch().reset(0, {"id": "7"})
        with pytest.raises(ConfigError, match="k: expected"):
            QuestionSearch(k=0)


class TestHotpotQA:
    def test_the_questions_of_a_file(self):
        task = HotpotQA(source=str(EXCERPT))
        assert len(task) == 3 and task.name == "hotpotqa"
        first = task[0]
        assert (first.id, first.answer) == ("made-0", "Mara Ellison")
        assert first.meta["supporting"] == ["Harriet Vale", "The Grey Lamp"] and len(first.meta["paragraphs"]) == 4
        assert task.question(first).startswith(first.question) and "Ellison" not in task.question(first)
        assert len(HotpotQA(source=str(EXCERPT), limit=2)) == 2
        assert [e.id for e in HotpotQA(eval_source=str(EXCERPT), split="eval")] == ["made-0", "made-1", "made-2"]
        with pytest.raises(TaskError, match="is one file and has no test split"):
            len(HotpotQA(source=str(EXCERPT), split="eval"))

    def test_a_row_of_the_hub(self, tmp_path):
        row = {
            "id": "5a", "question": "Who?", "answer": "Ida Roth", "type": "bridge", "level": "hard",
            "supporting_facts": {"title": ["B", "A", "B"], "sent_id": [0, 1, 2]},
            "context": {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]},
        }  # fmt: skip
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row))
        assert HotpotQA(source=str(file))[0] == Example("5a", "Who?", "Ida Roth", {
            "type": "bridge", "level": "hard", "supporting": ["A", "B"],
            "paragraphs": [{"title": "A", "text": "One. Two."}, {"title": "B", "text": "Three."}],
        })  # fmt: skip

    @pytest.mark.parametrize(("row", "message"), [
        ({"question": "Who?", "answer": "x"}, r"row 1 \(hotpotqa-0\) has no paragraphs to search"),
        ({"question": "Who?", "answer": "x", "paragraphs": []}, "has no paragraphs"),
        ({"question": "Who?", "answer": "x", "paragraphs": 3}, "paragraphs: expected a list of paragraphs"),
        ({"question": "Who?", "answer": "x", "context": {"title": ["a"], "sentences": []}}, "paragraphs: zip"),
        ({"question": "Who?", "answer": "x", "context": {"title": ["a"], "sentences": [3]}}, "paragraphs: "),
        ({"answer": "x", "paragraphs": ["a"]}, "has no question"),
        ({"question": "Who?", "paragraphs": ["a"]}, "has no answer"),
    ])  # fmt: skip
    def test_a_row_that_cannot_serve_is_named(self, row, message, tmp_path):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row))
        with pytest.raises(TaskError, match=message):
            len(HotpotQA(source=str(file)))

    @pytest.mark.parametrize(("text", "label", "answer", "correct", "reason"), [
        ("I looked.\nAnswer: the Mara Ellison.", "Mara Ellison", "the Mara Ellison.", True, "equals the label"),
        ("Answer: Ellison", "Mara Ellison", "Ellison", False, "differs from the label, F1 0.67"),
        ("Answer: no", "yes", "no", False, "differs from the label, F1 0.00"),
        ("So the answer is Tolvik\nAnswer: Brenna", "Brenna", "Brenna", True, "equals the label"),
        ("Mara Ellison", "Mara Ellison", None, False, "no final answer"),
        ("Answer:", "Mara Ellison", None, False, "no final answer"),
        ("Answer: the", "The", None, None, "the label 'The' has no words that can be compared"),
    ])  # fmt: skip
    def test_grades(self, text, label, answer, correct, reason):
        grade = HotpotQA(source=str(EXCERPT)).grade(Example("1", "?", label), text)
        assert (grade.answer, grade.correct, grade.reason) == (answer, correct, reason)

    def test_every_label_is_right_in_its_own_form(self, data):
        task = HotpotQA(source=str(data / "hotpotqa/distractor_dev.jsonl"))
        wrong = [e.id for e in task if task.grade(e, task.solution(e)).correct is not True]
        assert wrong == [] and len(task) >= 3

    def test_f1_is_a_reward_source(self):
        task = HotpotQA(source=str(EXCERPT))
        said = [
            Utterance(n, "ann", "p", 0, n, [], text)
            for n, text in enumerate(["Answer: Ellison", "?", "Answer: Mara Ellison"])
        ]
        said[1].answers = False
        hint = Utterance(3, "ann", "p", 1, 3, [], "Ellison")
        assert f1([Dialogue(task[0], [*said, hint])], task) == [[pytest.approx(2 / 3), None, 1.0, 0.0]]

    def test_the_measures(self):
        assert token_f1("Chief of Protocol", "the chief of protocol!") == 1.0
        assert token_f1("a b b c", "b b d") == pytest.approx(2 * 2 / (3 + 3))  # "a" is an article
        assert exact_match("U.S.", "us") and not exact_match("", "us")


def test_the_bare_questions_find_their_paragraphs(data):
    """Both paragraphs of a question are among five more often than not."""
    task = HotpotQA(source=str(data / "hotpotqa/distractor_dev.jsonl"))
    index = Index(read_corpus(str(data / "hotpotqa/distractor_dev.jsonl")))
    gold = found = 0
    for example in task:
        titles = {index.passages[number - 1].title for number, _ in index.search(example.question, 5)}
        gold += len(example.meta["supporting"])
        found += len(titles & set(example.meta["supporting"]))
    assert found / gold > 0.6
    if len(task) == 3:
        assert (found, gold) == (6, 6)
