// The changelog has the words of every page, and answers no question: it is last.
// `var`, because Sphinx declares the same name where there is none. Its own numbers, but a heading that has the whole question goes before pages that have its words somewhere.
var Scorer = {
  score: ([page, , , , score, , kind]) => score + (kind === "title" ? 10 : 0) - (page === "CHANGELOG" ? 1000 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
