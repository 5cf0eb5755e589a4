// What Python embeds. Each section is what one command wrote.

export interface Report {
  version: number;
  sundog: string;
  made: string;
  sections: Section[];
  before?: Report; // of a comparison
  old_name?: string;
  new_name?: string;
}

export type Section =
  | { kind: "check"; name: string; data: Check }
  | { kind: "trace"; name: string; data: Trace }
  | { kind: "summary"; name: string; data: Record<string, unknown> }
  | { kind: "bench"; name: string; data: Bench }
  | { kind: "probe"; name: string; data: Probe }
  | { kind: "isa"; name: string; data: { kernels: IsaKernel[] } }
  | { kind: "predict"; name: string; data: { points: Prediction[] } }
  | { kind: "tuning"; name: string; data: Tuning }
  | { kind: "ir"; name: string; data: { graphs: IrGraph[]; left_out: number } };

export type Machine = Record<string, string>;

export interface Access {
  rank: number;
  program: number[] | null;
  kernel: string;
  file: string;
  line: number;
  text: string;
  verb: string;
  sem: string;
  scope: string;
  allocation: string;
  indices: string;
}

export interface Finding {
  kind: string;
  rule: string;
  why: string;
  first: Access | null;
  second: Access | null;
  suggestion: string;
  token: string;
  count: number;
  run?: number;
  events?: number[];
}

export interface Lane {
  rank: number;
  kernel: string;
  program: number[] | null;
}

export interface Place {
  lane: number;
  what: string;
  sem: string;
  scope: string;
  file: string;
  line: number;
}

export interface Wait {
  rank: number;
  program: number[];
  kernel: string;
  flags: string[];
  seen: number[];
  expected: string;
  stack: string[];
  source: string[];
  owners: number[];
  owes: number | null;
}

export interface Host {
  rank: number;
  state: string;
  waits_for: string;
  at: string;
}

export interface Run {
  token: string;
  lanes: Lane[];
  places: Place[];
  dropped: number;
  events: [place: number, memory: string, times: number][];
  edges: [from: number, to: number, kind: string][];
  waits: Wait[];
  hosts: Host[];
  failure: string;
}

export type Source = Record<string, { first: number; lines: string[] }>;

export interface Mutant {
  name: string;
  where: string;
  what: string;
  killed_by: string;
  accepted: string;
  schedules: number;
}

export interface Check {
  machine?: Machine;
  target?: string;
  world?: number;
  coverage?: string;
  schedules: number;
  asked?: number;
  findings: Finding[];
  remarks: Finding[];
  notes: string[];
  mutants: Mutant[];
  runs: Run[];
  source?: Source;
}

export interface Trace {
  title: string;
  unit: string;
  clock: string;
  dropped: number;
  kinds: string[];
  spans: Record<SpanColumn, number[]>;
  arrows: [rank: number, program: number, time: number, rank2: number, program2: number, time2: number][];
}
export type SpanColumn =
  | "rank" | "program" | "kind" | "begin" | "length" | "what" | "value" | "peer" | "ended_by";

export interface BenchRow {
  variant: string;
  problem: string;
  config: string;
  programs: number;
  flops: number;
  hbm_bytes: number;
  link_bytes: number;
  limit_ns: number;
  wrong: string;
  samples_ns: number[];
}

export interface Bench {
  op: string;
  world: number;
  backend: string;
  link: string;
  machine: Machine;
  rates?: Record<string, number>;
  rows: BenchRow[];
}

export interface Probe {
  world: number;
  backend: string;
  replays: number;
  machine: Machine;
  rows: ProbeRow[];
}
export interface ProbeRow {
  name: string;
  verdict: string;
  expected: string;
  columns: Record<string, Record<string, unknown> & { verdict: string }>;
}

export interface IsaKernel {
  op: string;
  name: string;
  target: string;
  registers: number;
  spills: number;
  shared: number;
  barriers: number;
  tma: number;
  marks: { rule: string; where: string; text: string }[];
}

export interface Prediction {
  machine: string;
  problem: string;
  best: string;
  times: Record<string, { seconds: number; bound: string }>;
}

export interface TuningRun {
  session: string;
  kernel: string;
  problem: string;
  hardware: string;
  backend: string;
  world: number | null;
  seconds: number | null;
  started_at: string;
  versions: Record<string, string>;
  rows: {
    time_s: (number | null)[];
    status: string[];
    ms: (number | null)[];
    low_ms: (number | null)[];
    high_ms: (number | null)[];
    compile_s: (number | null)[];
    config: Record<string, unknown>[];
    error: string[];
  };
}
export interface Tuning {
  runs: TuningRun[];
  damage: string[];
  left_out: number;
}

export interface IrNode {
  id: string;
  label: string;
  parent: string | null;
  detail: Record<string, string>;
  at: [file: string, line: number] | [];
}
export interface IrGraph {
  ir_id: string;
  run: string;
  kernel: string;
  stage: string;
  config: Record<string, unknown>;
  ms: number | null;
  nodes: IrNode[];
  edges: [from: string, to: string, kind: string][];
  source: Source;
  left_out: number;
}

/** The sections of one kind. */
export function of<K extends Section["kind"]>(report: Report, kind: K): Extract<Section, { kind: K }>[] {
  return report.sections.filter((each): each is Extract<Section, { kind: K }> => each.kind === kind);
}
