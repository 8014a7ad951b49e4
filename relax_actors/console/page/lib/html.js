// What views are made of: `html` is a template that escapes every value, so texts of a model stay texts.
export {
  html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useErrorBoundary,
} from "../vendor/htm-preact.js";
