"""run_all.py 03 07 ...: runs the scripts of these cases in one process (imports once)."""
import sys, os, runpy, traceback, time
here = os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0, here)
for n in sys.argv[1:]:
    t = time.time()
    try: runpy.run_path(os.path.join(here, n + ".py"), run_name="__main__"); print(n, "ok", round(time.time() - t, 1), flush=True)
    except Exception: traceback.print_exc(); print(n, "FAILED", flush=True)
