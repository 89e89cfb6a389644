from own1 import *


class Run(Packed):
    P, G, STEPS = 8, 6, 12
    seed = 3

    def forward(self, model, ids, places, documents):
        return model(ids, places)

    def prove(self):
        gaps = [h["gap_max"] for h in self.history]
        assert min(gaps) > 0.05, gaps
        return {"largest_gap_to_sampler": gaps, "gap": [h["gap"] for h in self.history]}


Run().main()
