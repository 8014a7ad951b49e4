// The views of the console, a file each. To add one, write `views/<name>.js` and add its line here.
//
// A view exports a component by default. Its props: `run` (name), `parameters` (of the fragment), `live`, `pulse`
// (changes when the log brought something new; pass it to `useAnswer`), `theme`, `session` ({operations, ...}).
export const VIEWS = [
  { name: "run", title: "Run", load: () => import("./run.js") },
  { name: "actors", title: "Actors", load: () => import("./actors.js") },
  { name: "weights", title: "Weights", load: () => import("./weights.js") },
  { name: "evaluation", title: "Evaluation", load: () => import("./evaluation.js") },
  { name: "scaling", title: "Scaling", load: () => import("./scaling.js") },
  { name: "rows", title: "Rows", load: () => import("./rows.js") },
  { name: "anatomy", title: "Batch anatomy", load: () => import("./anatomy.js") },
  { name: "sample", title: "Sample", load: () => import("./sample.js") },
  { name: "timeline", title: "Timeline", load: () => import("./timeline.js") },
  { name: "advice", title: "Advice", load: () => import("./advice.js") },
];
