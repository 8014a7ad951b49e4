// Answers that stay fresh: asked again when the log of the run brings something new, at most once a second.
import { get } from "./api.js";
import { useEffect, useRef, useState } from "./html.js";

/** Whether an error is not shown: of a request that was given up, or of a pulse after the end of the run. */
export function isSilent(error, pulse) {
  return error.name === "AbortError" || (pulse && error.code === "run_not_up");
}

/**
 * Ask for an answer of the console.
 * @param {string} name name of the answer; empty asks for nothing
 * @param {object} parameters parameters of the request
 * @param {number} pulse changes when the answer may have changed
 * @returns {{data: object | null, error: Error | null}} the newest answer, and why there is no newer one
 */
export function useAnswer(name, parameters, pulse = 0) {
  const key = JSON.stringify([name, parameters]);
  const [state, setState] = useState({ key: "", data: null, error: null });
  const asking = useRef(null);
  const asked = useRef("");
  useEffect(() => () => asking.current?.abort(), [key]);
  useEffect(() => {
    if (!name || (asking.current && !asking.current.signal.aborted && asking.current.key === key)) return;
    const halt = new AbortController();
    halt.key = key;
    asking.current = halt;
    const again = asked.current === key;
    asked.current = key;
    get(name, parameters, halt.signal, again)
      .then((data) => setState({ key, data, error: null }))
      .catch((error) => isSilent(error, again) || setState((old) => ({ key, data: old.key === key ? old.data : null, error })))
      .finally(() => { if (asking.current === halt) asking.current = null; });
  }, [key, pulse]);
  return state.key === key ? state : { data: null, error: null };
}
