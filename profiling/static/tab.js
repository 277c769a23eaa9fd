// The ClusterKV tab: chooses a run, or two to compare, and shows the server's page in a frame.
const STYLE = `
  html, body { margin: 0; height: 100%; font: 14px system-ui, "DejaVu Sans", sans-serif; }
  body { display: flex; flex-direction: column; background: #fff; color: #1b2129; }
  header { display: flex; gap: 12px; align-items: center; padding: 8px 14px;
           border-bottom: 1px solid #d9dee4; flex-wrap: wrap; }
  select { font: inherit; max-width: 40vw; }
  iframe { border: 0; flex: 1; }
  p { padding: 20px; }
  @media (prefers-color-scheme: dark) {
    body { background: #14181d; color: #e7ebf0; }
    header { border-color: #343c45; }
    select { background: #1c2127; color: #e7ebf0; border: 1px solid #343c45; }
  }`;

function element(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function chooser(label, runs, first) {
  const select = element("select", { ariaLabel: label });
  if (first) select.add(new Option(first, ""));
  for (const run of runs) select.add(new Option(run.name, run.name));
  return [element("label", {}, `${label} `, select), select];
}

export async function render() {
  const runs = await (await fetch("./runs")).json();
  document.head.append(element("style", { textContent: STYLE }));
  if (!runs.length) {
    document.body.append(
      element("p", { textContent: "No report in this log directory yet." }));
    return;
  }
  const [runLabel, run] = chooser("Run", runs);
  const comparable = runs.filter((one) => one.can_compare);
  const [otherLabel, other] = chooser("compare with", comparable, "nothing");
  const frame = element("iframe", { title: "report" });
  const show = () => {
    const name = encodeURIComponent(run.value);
    frame.src = other.value
      ? `./compare?left=${name}&right=${encodeURIComponent(other.value)}`
      : `./report?run=${name}`;
  };
  run.onchange = other.onchange = show;
  document.body.append(element("header", {}, runLabel, otherLabel), frame);
  show();
}
