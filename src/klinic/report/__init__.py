"""A run to look at: one HTML file, or the same in a terminal. Completions in it are hostile text.

gaps.py       the three log-prob gaps of a token, and where they lie: over steps and positions
heat.py       some completions of some steps, token by token, and who owns the KL
marks.py      what happened to a run, as marks in its curves
reading.py    all of a run that a report shows
pictures.py   curves and lanes, as SVG that goes into the page
page.py       the page
model_card.py what a saved model says of itself
terminal.py   heat map and gaps as text
live.py       a run that another process writes, as it stands now
live_view.py  that as a screen of text, or as a line a step
serving.py    the page of a run that goes on, for browsers of this machine
"""
