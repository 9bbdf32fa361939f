// The order of what a search finds: pages whose title has the words of the query first, guides before records and generated pages.
const searched = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().match(/[\w.]+/g) || [];
const rooms = [[/^(guides|tutorials)\/|^quickstart$/, 10], [/^(reference\/generated|contributing|migrating)/, -15]];

var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    const words = title.toLowerCase().match(/\w+/g) || [];
    const named = searched.filter((word) => words.includes(word) || title.toLowerCase().endsWith("." + word));
    const room = rooms.find(([pattern]) => pattern.test(page));
    const found = kind === "object" ? 0 : Math.min(score, 15);  // an object's own page is found by its title
    return found + 20 * (named.length / searched.length) + (room ? room[1] : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
