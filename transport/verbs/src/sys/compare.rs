//! Compares the declarations of this binding with the crate rdma-sys, and with the installed C headers.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::process::Command;
use std::{env, fs};

use super::declare::{Field, Structure};
use super::{calls, cma, ibv, ibv_enums};

/// Returns one line for each structure and for each field, with its size and its alignment or
/// offset.
fn lines(structures: &[Structure]) -> Vec<String> {
    let mut lines = Vec::new();
    for Structure { name, size, align, fields } in structures {
        lines.push(format!("{name} size {size} align {align}"));
        lines.extend(
            fields.iter().map(|field| format!("{name}.{} offset {} size {}", field.name, field.offset, field.size)),
        );
    }
    lines
}

fn declared() -> Vec<String> {
    [lines(&ibv::structures()), lines(&cma::structures())].concat()
}

/// Returns the lines that are in only one of the two lists.
fn differences(ours: &[String], theirs: &[String]) -> Vec<String> {
    let (left, right): (BTreeSet<_>, BTreeSet<_>) = (ours.iter().collect(), theirs.iter().collect());
    let only = |of: &BTreeSet<&String>, other: &BTreeSet<&String>, who: &str| {
        of.difference(other).map(|line| format!("{who}: {line}")).collect::<Vec<_>>()
    };
    [only(&left, &right, "here"), only(&right, &left, "there")].concat()
}

fn report(what: &str, compared: usize, differences: &[String]) {
    println!("{compared} {what} compared, {} differences", differences.len());
    assert!(compared > 20, "{what}: nothing was compared");
    assert!(differences.is_empty(), "{what}: {differences:#?}");
}

#[test]
fn structures_are_those_of_rdma_sys() {
    let theirs = [lines(&ibv::structures_of_rdma_sys()), lines(&cma::structures_of_rdma_sys())].concat();
    let ours = declared();
    report("numbers of structures", ours.len(), &differences(&ours, &theirs));
}

#[test]
fn constants_are_those_of_rdma_sys() {
    let all = [ibv_enums::constants(), cma::constants()].concat();
    let different: Vec<_> =
        all.iter().filter(|(_, ours, theirs)| ours != theirs).map(|constant| format!("{constant:?}")).collect();
    report("constants", all.len(), &different);
}

/// Returns the name of a function type, without the paths of the types in it.
fn without_paths(name: &str) -> String {
    let mut short = String::new();
    let mut word = String::new();
    let mut rest = name.chars().peekable();
    while let Some(c) = rest.next() {
        if c.is_alphanumeric() || c == '_' {
            word.push(c);
        } else if c == ':' && rest.peek() == Some(&':') {
            rest.next();
            word.clear();
        } else {
            short.push_str(&word);
            word.clear();
            short.push(c);
        }
    }
    // The type of an event is an enumeration in rdma-sys and in the headers. This binding declares a number instead.
    (short + &word).replace("ibv_event_type", "u32")
}

#[test]
fn functions_have_the_types_of_rdma_sys() {
    let all = calls::signatures();
    let different: Vec<_> = all
        .iter()
        .map(|(name, ours, theirs)| (name, without_paths(ours), without_paths(theirs)))
        .filter(|(_, ours, theirs)| ours != theirs)
        .map(|(name, ours, theirs)| format!("{name}: {ours} here, {theirs} there"))
        .collect();
    report("functions", all.len(), &different);
}

/// Returns the C type for a Rust type in the signature of a function.
fn in_c(name: &str) -> String {
    let name = name.trim();
    if let Some(to) = name.strip_prefix("*mut ") {
        return format!("{} *", in_c(to));
    }
    if let Some(to) = name.strip_prefix("*const ") {
        return format!("const {} *", in_c(to));
    }
    match name {
        "i32" => "int".into(),
        "u32" => "unsigned int".into(),
        "u8" => "uint8_t".into(),
        "u64" => "uint64_t".into(),
        "usize" => "size_t".into(),
        "c_void" | "()" => "void".into(),
        "i8" => "char".into(),
        structure => format!("struct {structure}"),
    }
}

/// Returns a C declaration of a function pointer that is initialised with the header's function. It compiles only if
/// the function has the type `signature`.
fn prototype(name: &str, signature: &str) -> String {
    let short = without_paths(signature);
    let (_, rest) = short.split_once("fn(").expect("a function type");
    let (arguments, result) = rest.split_once(')').expect("a function type");
    let result = result.trim().strip_prefix("->").unwrap_or("()");
    let arguments: Vec<_> = arguments.split(',').map(in_c).filter(|argument| argument != "struct ").collect();
    let arguments = if arguments.is_empty() { "void".into() } else { arguments.join(", ") };
    format!("{} (*check_{name})({arguments}) = &{name};\n", in_c(result))
}

/// Returns the C names of a structure and a field. They differ from the Rust names if the structure or the field has no
/// name in C.
fn c_name(structure: &str, field: &str) -> Option<(String, String)> {
    let whole = |name: &str| Some((format!("struct {name}"), field.to_owned()));
    match (structure, field) {
        // The structure has no name in C. The C compiler checks it as a part of the structure that contains it.
        (
            "ibv_gid_global_t"
            | "rdma_t"
            | "atomic_t"
            | "ud_t"
            | "xrc_t"
            | "bind_mw_t"
            | "tso_t"
            | "ibv_odp_caps__bindgen_ty_1",
            _,
        ) => None,
        // The field is a union without a name in C. Its first member has the same offset.
        ("ibv_wc" | "ibv_send_wr", "imm_data_invalidated_rkey_union") => {
            Some((format!("struct {structure}"), "imm_data".into()))
        }
        ("ibv_send_wr", "bind_mw_tso_union") => Some(("struct ibv_send_wr".into(), "bind_mw".into())),
        ("rdma_addr", "src_addr_union") => Some(("struct rdma_addr".into(), "src_storage".into())),
        ("rdma_addr", "dst_addr_union") => Some(("struct rdma_addr".into(), "dst_storage".into())),
        ("verbs_context", "priv_") => Some(("struct verbs_context".into(), "priv".into())),
        (name, _) => whole(name),
    }
}

/// Builds a C program with the installed headers, runs it, and returns its output: the numbers of the layout of each structure. The build
/// fails if a constant or the type of a function differs from the binding.
fn ask_the_headers() -> Vec<String> {
    let mut program = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n",
    );
    for (name, ours, _) in calls::signatures() {
        program += &prototype(name, ours);
    }
    for (name, ours, _) in [ibv_enums::constants(), cma::constants()].concat() {
        writeln!(program, "_Static_assert((long){name} == {ours}, \"{name}\");").unwrap();
    }
    let options = [
        ("RDMA_OPTION_ID", super::RDMA_OPTION_ID),
        ("RDMA_OPTION_ID_TOS", super::RDMA_OPTION_ID_TOS),
        ("RDMA_OPTION_ID_REUSEADDR", super::RDMA_OPTION_ID_REUSEADDR),
        ("RDMA_OPTION_ID_AFONLY", super::RDMA_OPTION_ID_AFONLY),
        ("RDMA_OPTION_ID_ACK_TIMEOUT", super::RDMA_OPTION_ID_ACK_TIMEOUT),
    ];
    for (name, ours) in options {
        writeln!(program, "_Static_assert({name} == {ours}, \"{name}\");").unwrap();
    }
    program += "int main(void) {\n";
    for structure in ibv::structures().iter().chain(&cma::structures()) {
        let name = structure.name;
        let Some((c_structure, _)) = c_name(name, "") else { continue };
        writeln!(program, "printf(\"{name} size %zu align %zu\\n\", sizeof({c_structure}), _Alignof({c_structure}));")
            .unwrap();
        for Field { name: field, .. } in &structure.fields {
            let Some((_, c_field)) = c_name(name, field) else { continue };
            writeln!(
                program,
                "printf(\"{name}.{field} offset %zu size %zu\\n\", offsetof({c_structure}, {c_field}), \
                 sizeof((({c_structure} *)0)->{c_field}));"
            )
            .unwrap();
        }
    }
    program += "return 0; }\n";
    let directory = env::temp_dir().join(format!("rdma-layout-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let (source, binary) = (directory.join("layout.c"), directory.join("layout"));
    fs::write(&source, program).unwrap();
    let built = Command::new("cc")
        .args(["-Wall", "-Werror=incompatible-pointer-types", "-o"])
        .args([&binary, &source])
        .args(["-libverbs", "-lrdmacm"])
        .output()
        .expect("a C compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let said = Command::new(&binary).output().unwrap();
    fs::remove_dir_all(&directory).unwrap();
    String::from_utf8(said.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn structures_constants_and_functions_are_those_of_the_headers() {
    let ours: Vec<_> = declared()
        .into_iter()
        .filter(|line| {
            let name = line.split([' ', '.']).next().unwrap();
            c_name(name, "").is_some()
        })
        .collect();
    report("numbers of structures in C", ours.len(), &differences(&ours, &ask_the_headers()));
}
