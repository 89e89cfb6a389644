"""Reports of a run: an HTML page, a terminal view, a live view. Completions are untrusted text.

logp_gaps.py        the three log-prob gaps of a token, by step and by position
curves.py           metrics as bounded curves
token_heatmap.py    token heat map of selected completions, and the tokens with the most KL
timeline_events.py  events shown in the curves
reading.py          reads everything that a report shows of a run
pictures.py         curves and gap lanes as inline SVG
page.py             the HTML page
model_card.py       the model card of a saved model
terminal.py         heat map and gaps as text
live.py             snapshots of a run that another process writes
live_view.py        a snapshot as a screen of text, or as one line per step
serving.py          local HTTP server for the page of a running run
"""
