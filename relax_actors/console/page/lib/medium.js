// An image, a video or a sound of a row, fetched by its digest.
import { blob } from "./api.js";
import { bytes } from "./format.js";
import { html, useEffect, useState } from "./html.js";

const SMALL = 4 << 20;

export function Medium({ run, row, medium }) {
  const [wanted, setWanted] = useState(medium.size > 0 && medium.size <= SMALL);
  const [state, setState] = useState({});
  useEffect(() => {
    if (!wanted) return undefined;
    let address = null;
    let gone = false;
    blob("media", { run, row, digest: medium.digest })
      .then((content) => { address = URL.createObjectURL(content); gone ? URL.revokeObjectURL(address) : setState({ address }); })
      .catch((error) => gone || setState({ error }));
    return () => { gone = true; if (address) URL.revokeObjectURL(address); };
  }, [run, row, medium.digest, wanted]);
  const name = `${medium.kind} ${medium.name}`;
  return html`<figure class="medium">
    ${!wanted && html`<button onClick=${() => setWanted(true)}>Show ${name}</button>`}
    ${state.error && html`<p class="bad" role="alert">${state.error.message}</p>`}
    ${state.address && medium.kind === "image" && html`<img src=${state.address} alt=${name} />`}
    ${state.address && medium.kind === "video" && html`<video src=${state.address} controls aria-label=${name}></video>`}
    ${state.address && medium.kind === "audio" && html`<audio src=${state.address} controls aria-label=${name}></audio>`}
    <figcaption class="dim">${name}${medium.size ? `, ${bytes(medium.size)}` : ""}${medium.start !== null || medium.end !== null ? `, seconds ${medium.start ?? 0} to ${medium.end ?? "its end"}` : ""}, <code>${medium.digest}</code></figcaption>
  </figure>`;
}
