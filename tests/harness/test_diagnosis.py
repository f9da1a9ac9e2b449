"""The page of measured diagnoses is that of its record, and counts what it says."""

from harness.diagnosis import page
from harness.diagnosis.chosen import COUNT, chosen
from harness.diagnosis.measure import Row
from harness.problem import Problem


def test_the_page_is_that_of_the_record(tmp_path):
    page.write(tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == page.PAGE.read_text()


def test_the_rows_are_of_the_chosen_mutants_and_none_was_tuned_on():
    stored = page.load()
    names = [row.mutant for row in stored["rows"]]
    assert len(set(names)) == len(names) <= COUNT
    assert set(names) <= {mutant.id for mutant in chosen()}
    assert set(names).isdisjoint(stored["tuned"])


def test_a_stage_is_named_by_the_line_that_names_what_the_function_makes():
    row = Row("m", "formula", "chunk-unbounded", "chunk", "kda/wy_fast.py:kda_solve_blocks_kernel")
    lines = {
        "inverse is the first outside its envelope (3 x its limit), the first of all": True,
        "kernel kda_solve_blocks_kernel, as the sanitizer says": True,
        "w is the first outside its envelope (3 x its limit)": False,
        "not known: exposes no intermediates": False,
    }
    assert {line: Row(**{**vars(row), "stage": line}).names_stage for line in lines} == lines
    problem = Problem(entry="chunk", lengths=(33, 70), packed=True, tail=2, heads=2, v_first=True, chunk_size=32)
    sizes = Row(**{**vars(row), "problem": problem.to_json()}).sizes
    assert sizes == {"heads": 2, "boundaries": 5, "flags": 3, "tokens": 105}
