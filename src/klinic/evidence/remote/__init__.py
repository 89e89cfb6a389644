"""Runs at a URL: an object store, or a folder that several machines share.

url.py           which texts are URLs of runs, and where such a run works on this machine
object_store.py  the files at a URL, through fsspec
snapshot.py      the manifest of a published state of a run, and the newest one at a URL
publishing.py    publishes the state of a local run folder
fetching.py      brings a published run into a local folder

A run trains in a local folder; its state is published at the URL. Content has a new name each time,
and a manifest that is written last names it, so no file is replaced or renamed.
"""
