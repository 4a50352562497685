"""Tables on terminals of any width."""

from nearplane.cli.printing import table


def test_a_table_too_wide_for_the_terminal_leaves_out_columns_not_digits(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    table(("layer", "loss", "other"), [("model.layers.0.self_attn.q_proj", "9.07e-04", "1.25")])
    said = capsys.readouterr().out
    assert "9.07e-04" in said
    assert "1.25" not in said
    assert "columns left out: other" in said
    monkeypatch.setenv("COLUMNS", "30")
    table(("layer", "loss", "other"), [("model.layers.0.self_attn.q_proj", "9.07e-04", "1.25")])
    assert "columns left out: loss, other" in capsys.readouterr().out
