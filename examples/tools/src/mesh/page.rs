//! The heat map as an HTML page that needs no other file. The page shows the figures of the pair under the mouse pointer.

use serde_json::json;

use super::heatmap::{escape, svg};
use super::report::{Report, SHM};

/// The number of rows in the table of the page.
const ROWS: usize = 50;

/// The script that shows the figures of the pair under the mouse pointer.
const SCRIPT: &str = r#"
const data = JSON.parse(document.getElementById("data").textContent);
const hover = document.getElementById("hover");
const n = data.ranks.length;
const index = (a, b) => { const l = Math.min(a, b), h = Math.max(a, b); return l * (2 * n - l - 1) / 2 + h - l - 1; };
const show = (value, unit) => value === null ? "not measured" : value.toPrecision(3) + " " + unit;
const who = rank => { const r = data.ranks[rank]; return "rank " + rank + " on " + r[0]; };
function text(from, to) {
  const gone = rank => data.ranks[rank][2] ? "\n" + who(rank) + " is gone: " + data.ranks[rank][2] : "";
  if (from === to) return who(from) + ", " + data.ranks[from][1] + gone(from);
  const p = data.pairs[index(from, to)];
  const up = from < to ? [p[2], p[4]] : [p[3], p[5]], down = from < to ? [p[3], p[5]] : [p[2], p[4]];
  return who(from) + " to " + who(to)
    + "\nlatency: p50 " + show(p[0], "us") + ", p99 " + show(p[1], "us")
    + "\nbandwidth: " + show(up[0], "Gb/s") + ", back " + show(down[0], "Gb/s")
    + "\nwhile all send to all: " + show(up[1], "Gb/s") + ", back " + show(down[1], "Gb/s")
    + "\n" + data.ranks[from][1] + " to " + data.ranks[to][1]
    + (p[7] ? "\n" + data.shm : "")
    + p[6].map(what => "\n" + what).join("");
}
for (const panel of document.querySelectorAll(".panel")) {
  panel.addEventListener("pointermove", event => {
    const box = panel.getBoundingClientRect();
    const place = (at, from, size) => Math.min(n - 1, Math.max(0, Math.floor((at - from) / size * n)));
    hover.textContent = text(place(event.clientY, box.top, box.height), place(event.clientX, box.left, box.width));
    hover.style.display = "block";
    const left = event.clientX + 16 + hover.offsetWidth > innerWidth ? event.clientX - 16 - hover.offsetWidth : event.clientX + 16;
    hover.style.left = Math.max(0, left) + scrollX + "px";
    hover.style.top = event.clientY + 16 + scrollY + "px";
  });
  panel.addEventListener("pointerleave", () => { hover.style.display = "none"; });
}
"#;

/// Formats the results as an HTML page.
#[must_use]
pub fn html(report: &Report<'_>) -> String {
    let results = report.results;
    let ranks = results.members().iter().map(|member| {
        let carrier = member.entry.as_ref().map(|entry| format!("{} {}", entry.provider, entry.device));
        json!([member.host(), carrier, member.gone])
    });
    let pairs = results.pairs().map(|(a, b, pair)| {
        let latency = pair.latency;
        json!([
            latency.map(|latency| latency.p50_us),
            latency.map(|latency| latency.p99_us),
            pair.up.gbit,
            pair.down.gbit,
            pair.up.loaded_gbit,
            pair.down.loaded_gbit,
            report.complaints(a, b),
            pair.shm,
        ])
    });
    let data =
        json!({ "ranks": ranks.collect::<Vec<_>>(), "pairs": pairs.collect::<Vec<_>>(), "shm": SHM }).to_string();
    // The name of a host may contain `</script>`, which must not end the script element.
    let data = data.replace('<', "\\u003c");
    format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>rdma-mesh</title>\n\
         <style>body{{font:14px sans-serif;margin:1em}}#hover{{position:absolute;display:none;white-space:pre-wrap;\
         background:#fffff0;border:1px solid #808080;padding:6px 9px;pointer-events:none;max-width:36em}}\
         pre{{overflow-x:auto}}</style>\n{}<pre>{}</pre>\n<div id=\"hover\" role=\"status\"></div>\n\
         <script id=\"data\" type=\"application/json\">{data}</script>\n<script>{SCRIPT}</script>\n</html>\n",
        svg(report),
        escape(&report.text(ROWS)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::sample;

    #[test]
    fn the_data_is_whole_and_no_name_leaves_its_element() {
        let mut results = sample::faulty();
        if let Some(entry) = &mut results.member_mut(3).entry {
            entry.host = "</script><b>".into();
        }
        let page = html(&Report::new(&results, 3.0));
        assert_eq!(page.matches("</script>").count(), 2);
        assert!(!page.contains("<b>"));
        let data = page.split("application/json\">").nth(1).and_then(|rest| rest.split("</script>").next()).unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["ranks"][3][0], "</script><b>");
        assert_eq!(data["pairs"].as_array().unwrap().len(), 21);
        assert_eq!(data["pairs"][6][0], 120.0, "ranks 1 and 2");
        let shm = data["pairs"].as_array().unwrap().iter().map(|pair| pair[7] == true);
        assert_eq!(shm.enumerate().filter(|(_, shm)| *shm).map(|(at, _)| at).collect::<Vec<_>>(), [17], "3 and 6");
        assert!(!page.contains("http://") || page.matches("http").count() == 1, "only the name space of SVG");
    }
}
