import sys, torch, traceback, time
torch.set_num_threads(1)
from tests.zoo.exact import differences
from tests.zoo.tables import entries, TABLES
byname = {}
for t in TABLES:
    for e in entries(t): byname.setdefault(e.name, e)
for n in sys.argv[1:]:
    t=time.time()
    try:
        d = differences(byname[n])
        bad = {k: v for k, v in d.items() if not v < 1e-5}
        print(n, round(time.time()-t,1), len(d), "max", max([v for k, v in d.items() if "not measured" not in k], default=None), "bad", bad, flush=True)
    except Exception as e:
        print(n, "ERR", type(e).__name__, str(e)[:300], flush=True); traceback.print_exc(limit=-4)
