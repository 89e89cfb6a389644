"""Reports of a run: an HTML page, a terminal view, a live view. Completions are untrusted text.

logp_gaps.py         the three log-prob gaps of a token, by step and by position
curves.py            metrics as bounded curves
step_measures.py     one number per step from the records: gaps, equal rewards, trained tokens
token_heatmap.py     token heat map of selected completions, for terminals
token_table.py       tokens of completions with every log-prob, for the token view of a page
timeline_events.py   events shown in the curves
run_header.py        model, trainer, steps, reward and KL from first to last
verdict_card.py      the verdict of records or of scalars, in one shape
evidence_picture.py  the curve that shows the evidence of a cause
evidence_row.py      a completion that shows the evidence of a cause
token_selectors.py   selects it by masks, ends, log-probs, ids and versions
reward_selectors.py  selects it by rewards, advantages and equal completions
cause_rows.py        the kinds of evidence of each cause
shown_completion.py  the text of that completion, readable without scripts
short_number.py      numbers as a page prints them
recorded_proof.py    the replay that `klinic diagnose --prove` stored
reading.py           reads everything that a report shows of a run
log_reading.py       the same for a scalar log
page_data.py         curves, gaps and tokens as compressed data of the page
page.py              the HTML page; its scripts are text.js, charts.js, lanes.js, tokens.js, page.js
model_card.py        the model card of a saved model
terminal.py          heat map and gaps as text
live.py              snapshots of a run that another process writes
live_view.py         a snapshot as a screen of text, or as one line per step
serving.py           local HTTP server for the page of a running run
"""
